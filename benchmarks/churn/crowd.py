"""The requests, and the verdict on each answer."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import httpx

from benchmarks.chat import Message

from .changes import Names
from .contents import BASE, Answer, Content, References, answer_of, body

HANG_UPS = 0.05  # of the requests
LOGPROB_TOLERANCE = 1e-4  # float32, as in the parity tests


@dataclass
class Verdicts:
    """How requests ended. Everything but `right`, `hung_up` and `without_bundle` is a fault."""

    counts: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)

    def add(self, verdict: str, detail: str = "") -> None:
        self.counts[verdict] += 1
        if verdict not in ("right", "hung_up", "without_bundle"):
            self.faults.append(f"{verdict}: {detail}")


@dataclass(frozen=True)
class Crowd:
    """Clients that ask random questions of random names."""

    client: httpx.AsyncClient
    questions: Sequence[list[Message]]
    models: Sequence[str]  # served names
    names: Names
    references: References
    verdicts: Verdicts

    async def ask(self, requests: int, concurrency: int, seed: int) -> None:
        """Send so many requests, at most `concurrency` of them at a time."""
        left = iter(range(requests))

        async def one_client(number: int) -> None:
            rng = random.Random(f"{seed}/{number}")
            for _ in left:  # shared by all clients
                await self._ask_once(rng)

        async with asyncio.TaskGroup() as group:
            for number in range(concurrency):
                group.create_task(one_client(number))

    async def _ask_once(self, rng: random.Random) -> None:
        model, number = rng.choice(self.models), rng.randrange(len(self.questions))
        patience = rng.uniform(0, 1) if rng.random() < HANG_UPS else None
        begin = time.monotonic()
        request = self.client.post("/v1/chat/completions", json=body(model, self.questions[number]))
        try:
            response = await asyncio.wait_for(request, patience)
        except TimeoutError:
            self.verdicts.add("hung_up")
            return
        self.verdicts.add(*self._verdict(model, number, begin, time.monotonic(), response))

    def _verdict(self, model: str, number: int, begin: float, end: float, response: httpx.Response) -> tuple[str, str]:
        if response.status_code == 404 and model != BASE and not self.names.always_there(model, begin, end):
            return "without_bundle", ""
        if response.status_code != 200:
            return "failed", f"{model}: HTTP {response.status_code}: {response.text[:200]}"
        answer = response.json()
        content = BASE if model == BASE else answer["kv_transfer_params"]["inducekv"]["digest"]
        if model != BASE and content not in self.names.may_be(model, begin, end):
            return "wrong_version", f"{model} answered with {content:.12}"
        return self._compare(model, content, number, answer_of(answer))

    def _compare(self, model: str, content: Content, number: int, answer: Answer) -> tuple[str, str]:
        expected = self.references[content, number]
        if answer.tokens != expected.tokens:
            return "other_tokens", f"{model}, question {number}: {answer.tokens}, alone {expected.tokens}"
        worst = max(abs(a - b) for a, b in zip(answer.logprobs, expected.logprobs, strict=True))
        if worst > LOGPROB_TOLERANCE:
            return "other_logprobs", f"{model}, question {number}: {worst:.1e} from the answer alone"
        return "right", ""
