"""What each content answers when it is asked alone, the requests, and the verdict on each answer."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import torch
from torch.nn.functional import normalize

from benchmarks.chat import Message
from inducekv_vllm.backbone.fingerprint import backbone_fingerprint
from inducekv_vllm.bundle import BackboneFingerprint, Bundle, EntryRecord, write_bundle

from .changes import Content, Names

PAYLOAD_TOKENS = 8
TOKENS = 24  # of an answer
BASE = "base"  # the served name of the model without memory
HANG_UPS = 0.05  # of the requests
LOGPROB_TOLERANCE = 1e-4  # float32, as in the parity tests


@dataclass(frozen=True)
class Answer:
    tokens: list[str]
    logprobs: list[float]


References = Mapping[tuple[Content, int], Answer]  # by content and question


def make_contents(model: Path, work: Path) -> dict[Content, Path]:
    """Bundles of random entries: two of both forms, one with a later version that changes a third of the entries, and
    two more of both forms.
    """
    backbone = backbone_fingerprint(model)
    merged, first, other = (random_bundle(backbone, entries) for entries in (8, 12, 10))
    values = first.payload_values.clone()
    values[:, ::3] *= 0.75
    later = remade(first, payload_values=values)
    decoupled = [
        remade(each, weighting="uniform", form="decoupled", activations={"random": activation})
        for each, activation in ((other, "prompt"), (merged, "text"))
    ]
    bundles = (merged, decoupled[0], first, later, other, decoupled[1])
    paths = {bundle.digest: work / f"{bundle.digest:.12}.safetensors" for bundle in bundles}
    for bundle in bundles:
        write_bundle(bundle, paths[bundle.digest])
    return paths


def random_bundle(
    backbone: BackboneFingerprint, entries: int, seed: int | None = None, task: str = "random", **fields: Any
) -> Bundle:
    """A merged memory of so many entries, or what other fields make of it; no two are to give the same answer.

    Args:
        seed: their number if None.
    """
    seed = entries if seed is None else seed
    layers, generator = backbone.num_layers, torch.Generator().manual_seed(seed)
    payload = (layers, entries, backbone.num_kv_heads, PAYLOAD_TOKENS, backbone.head_dim)
    return Bundle.create(
        retrieval_keys=normalize(torch.randn(entries, backbone.hidden_size, generator=generator), dim=1),
        payload_keys=torch.randn(payload, generator=generator),
        payload_values=torch.randn(payload, generator=generator),
        temperature=0.07,
        value_gates=torch.full((layers,), 0.5),
        layer_bias=torch.zeros(layers),
        backbone=backbone,
        budget=entries,
        entries=tuple(EntryRecord(id=f"{task}/{n}", task=task, source_digest=f"{n:064x}") for n in range(entries)),
        recipe="random",
        settings={},
        **({"weighting": "prior"} | fields),
    )


def remade(bundle: Bundle, **changed: Any) -> Bundle:
    """The bundle with other tensors or metadata."""
    names = ("backbone", "budget", "entries", "recipe", "settings", "weighting")
    fields = {name: getattr(bundle.metadata, name) for name in names}
    return Bundle.create(**bundle.tensors() | fields | changed)


def body(model: str, messages: list[Message]) -> dict[str, Any]:
    """A greedy request that tells its tokens' log-probabilities, and with a memory, whose it was."""
    request = {"model": model, "messages": messages, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    request |= {"logprobs": True, "return_tokens_as_token_ids": True}
    return request | ({} if model == BASE else {"vllm_xargs": {"inducekv_trace": 1}})


def answer_of(response: Mapping[str, Any]) -> Answer:
    steps = response["choices"][0]["logprobs"]["content"]
    return Answer([step["token"] for step in steps], [step["logprob"] for step in steps])


async def ask_alone(
    client: httpx.AsyncClient, questions: Sequence[list[Message]], names: Mapping[str, Content]
) -> dict[tuple[Content, int], Answer]:
    """Every question of every name that stands for a content, one after the other."""
    found = {}
    for name, content in names.items():
        for number, question in enumerate(questions):
            response = await client.post("/v1/chat/completions", json=body(name, question))
            response.raise_for_status()
            found[content, number] = answer_of(response.json())
    return found


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
        content = BASE if model == BASE else response.json()["kv_transfer_params"]["inducekv"]["digest"]
        if model != BASE and content not in self.names.may_be(model, begin, end):
            return "wrong_version", f"{model} answered with {content:.12}"
        answer, expected = answer_of(response.json()), self.references[content, number]
        if answer.tokens != expected.tokens:
            return "other_tokens", f"{model}, question {number}: {answer.tokens}, alone {expected.tokens}"
        worst = max(abs(a - b) for a, b in zip(answer.logprobs, expected.logprobs, strict=True))
        if worst > LOGPROB_TOLERANCE:
            return "other_logprobs", f"{model}, question {number}: {worst:.1e} from the answer alone"
        return "right", ""
