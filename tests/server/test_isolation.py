"""Hundreds of requests at once over three bundles and none: each answers as if it were alone."""

from __future__ import annotations

import asyncio
import itertools
import random
import re
from typing import Any

import httpx
import openai
import pytest

from tests.inducekv_vllm.parity import TOLERANCE, World, prompts
from tests.server.http import TRACED, ask, tokens_and_logprobs, trace_of
from tests.server.test_bundles import Bundles, wait_until

MODELS = ("base", "sqrt", "prior", "moving")
NUM_PROMPTS, REPEATS, NUM_TOKENS = 16, 4, 40
NUM_KEEPERS = 4
Answered = tuple[tuple[str, int], Any]  # the model and the number of the prompt, and the response


def preemptions(server: str) -> float:
    metrics = httpx.get(f"{server}/metrics", timeout=60).text
    return sum(map(float, re.findall(r"^vllm:num_preemptions_total{.*} (\S+)$", metrics, re.MULTILINE)))


@pytest.fixture
def moving(server: str, world: World) -> Any:
    """A name that stands for "other" first, and is taken away at the end."""
    bundles = Bundles(server)
    assert bundles.load("moving", world.paths["other"]).status_code == 200
    yield bundles
    bundles.unload("moving")


def test_each_answer_is_the_requests_own(server: str, client: openai.OpenAI, world: World, moving: Bundles) -> None:
    questions, leaving = prompts(NUM_PROMPTS, seed=21), prompts(NUM_PROMPTS, seed=22)
    jobs = [(model, i) for model in MODELS for i in range(NUM_PROMPTS)] * REPEATS
    random.Random(0).shuffle(jobs)
    replaced_by = world.paths["other"].with_name("replacement.safetensors")
    replaced_by.write_bytes(world.paths["prior"].read_bytes())
    before = preemptions(server)

    async def crowd() -> list[Answered]:
        # A connection for each request: the server closes one that was idle for 5 s, perhaps while it is taken again.
        many = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        connections = openai.DefaultAsyncHttpxClient(limits=many, timeout=600)
        async with openai.AsyncOpenAI(
            base_url=f"{server}/v1", api_key="none", max_retries=0, http_client=connections
        ) as crowd_client:

            async def one(model: str, messages: Any) -> Any:
                extra = {"ignore_eos": True, "return_tokens_as_token_ids": True}
                return await crowd_client.chat.completions.create(
                    model=model,
                    messages=messages,
                    temperature=0,
                    max_tokens=NUM_TOKENS,
                    logprobs=True,
                    extra_body=extra | (TRACED if model != "base" else {}),
                )

            async def leaves(model: str, index: int) -> None:
                """A client that hangs up: at once, during the key pass, or in the answer.

                Each has its own image: vLLM considers an image sent even if its client left while it was being read.
                """
                task = asyncio.create_task(one(model, leaving[index].messages))
                await asyncio.sleep(0.05 * index)
                task.cancel()

            async def answered(job: tuple[str, int]) -> Answered:
                return job, await one(job[0], questions[job[1]].messages)

            def start(some: list[tuple[str, int]]) -> list[asyncio.Task[Answered]]:
                return [asyncio.create_task(answered(job)) for job in some]

            replaced = asyncio.Event()

            async def keeps_asking(index: int) -> list[Answered]:
                """Keep the old version in use until the new one takes its name, whatever the server's batching."""
                answers = []
                while not replaced.is_set():
                    answers.append(await answered(("moving", index)))
                return answers

            half = len(jobs) // 2
            first = start(jobs[:half])
            keepers = asyncio.gather(*map(keeps_asking, range(NUM_KEEPERS)))
            hang_ups = asyncio.gather(*(leaves(MODELS[i % 4], i) for i in range(NUM_PROMPTS)))
            moved = [task for task, (model, _) in zip(first, jobs, strict=False) if model == "moving"]
            await asyncio.wait(moved, return_when=asyncio.FIRST_COMPLETED)
            loaded = await asyncio.to_thread(moving.load, "moving", replaced_by, replace=True)
            replaced.set()
            assert loaded.status_code == 200, loaded.text
            second = start(jobs[half:])
            await hang_ups
            return [*await asyncio.gather(*first, *second), *itertools.chain(*await keepers)]

    answers = asyncio.run(crowd())
    assert preemptions(server) > before

    moving.load("before", world.paths["other"])
    alone: dict[tuple[str, int], tuple[list[int], list[float]]] = {}
    digests = {"before": world.bundles["other"].digest, "after": world.bundles["prior"].digest}
    for model in ("base", "sqrt", "prior", "before"):
        for index, prompt in enumerate(questions):
            alone[model, index] = tokens_and_logprobs(ask(client, model, prompt, max_tokens=NUM_TOKENS))
    moving.unload("before")

    versions = set()
    assert len(answers) >= len(jobs) + NUM_KEEPERS
    for (model, index), response in answers:
        assert response.model == model
        expected = model
        if model != "base":
            trace = trace_of(response)
            assert trace["bundle"] == model
            if model == "moving":
                versions.add(trace["digest"])
                expected = "before" if trace["digest"] == digests["before"] else "prior"
            else:
                assert trace["digest"] == world.bundles[model].digest
        tokens, logprobs = tokens_and_logprobs(response)
        assert tokens == alone[expected, index][0]
        assert logprobs == pytest.approx(alone[expected, index][1], abs=TOLERANCE)
    assert versions == set(digests.values())
    assert len({tuple(tokens) for tokens, _ in alone.values()}) > len(alone) // 2  # answers do differ
    wait_until(lambda: not moving.list()["draining"])
    assert all(card["active_requests"] == 0 for card in moving.list()["data"])
