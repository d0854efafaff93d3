"""More than a hundred requests at once over three bundles and none: each answers as if it were alone."""

import asyncio
import itertools
import random
from collections.abc import AsyncIterator, Coroutine
from typing import Any

import httpx
import openai
import pytest

from tests.engine.parity import TOLERANCE, Prompt, World, prompts
from tests.server.http import TRACED, Bundles, ask, preemptions, tokens_and_logprobs, trace_of

pytestmark = pytest.mark.anyio

MODELS = ("base", "first", "second", "moving")
NUM_PROMPTS, REPEATS, NUM_TOKENS = 8, 4, 24
NUM_KEEPERS = 4
Job = tuple[str, int]  # the model and the number of the prompt


@pytest.fixture
async def crowd(server: str) -> AsyncIterator[openai.AsyncOpenAI]:
    # A connection for each request: the server closes one that was idle for 5 s, perhaps while it is taken again.
    many = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    connections = openai.DefaultAsyncHttpxClient(limits=many, timeout=600)
    url = f"{server}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, http_client=connections) as client:
        yield client


async def test_each_answer_is_the_requests_own(
    server: str, bundles: Bundles, client: openai.OpenAI, crowd: openai.AsyncOpenAI, world: World
) -> None:
    """The name "moving" stands for "other" first, and is given to "second" while requests run."""
    questions, leaving = prompts(NUM_PROMPTS, seed=21), prompts(NUM_PROMPTS, seed=22)
    jobs = [(model, i) for model in MODELS for i in range(NUM_PROMPTS)] * REPEATS
    random.Random(0).shuffle(jobs)
    replaced = asyncio.Event()

    def request(model: str, prompt: Prompt) -> Coroutine[Any, Any, Any]:
        return ask(crowd, model, prompt, max_tokens=NUM_TOKENS, extra_body={} if model == "base" else TRACED)

    async def answered(model: str, index: int) -> tuple[Job, Any]:
        return (model, index), await request(model, questions[index])

    async def leaves(model: str, index: int) -> None:
        """A client that hangs up: at once, while its prompt is computed, or in the answer.

        Each has its own image: vLLM considers an image sent even if its client left while it was being read.
        """
        task = asyncio.create_task(request(model, leaving[index]))
        await asyncio.sleep(0.05 * index)
        task.cancel()

    async def keeps_asking(index: int) -> list[tuple[Job, Any]]:
        """Keep the old version in use until the new one takes its name, whatever the server's batching."""
        answers = []
        while not replaced.is_set():
            answers.append(await answered("moving", index))
        return answers

    async def run_jobs() -> list[tuple[Job, Any]]:
        half = len(jobs) // 2
        first = [asyncio.create_task(answered(*job)) for job in jobs[:half]]
        keepers = asyncio.gather(*map(keeps_asking, range(NUM_KEEPERS)))
        hang_ups = asyncio.gather(*(leaves(MODELS[i % 4], i) for i in range(NUM_PROMPTS)))
        moved = [task for task, (model, _) in zip(first, jobs, strict=False) if model == "moving"]
        await asyncio.wait(moved, return_when=asyncio.FIRST_COMPLETED)
        loaded = await asyncio.to_thread(bundles.load, "moving", world.paths["second"], replace=True)
        replaced.set()
        assert loaded.status_code == 200, loaded.text
        second = [asyncio.create_task(answered(*job)) for job in jobs[half:]]
        await hang_ups
        return [*await asyncio.gather(*first, *second), *itertools.chain(*await keepers)]

    before = preemptions(server)
    with bundles.loaded("moving", world.paths["other"]):
        answers = await run_jobs()
        bundles.wait_until_drained()
        assert all(card["active_requests"] == 0 for card in bundles.list()["data"])
    assert preemptions(server) > before

    alone: dict[Job, tuple[list[int], list[float]]] = {}
    with bundles.loaded("before", world.paths["other"]):
        for model in ("base", "first", "second", "before"):
            for index, prompt in enumerate(questions):
                alone[model, index] = tokens_and_logprobs(ask(client, model, prompt, max_tokens=NUM_TOKENS))
    assert len({tuple(tokens) for tokens, _ in alone.values()}) > len(alone) // 2  # answers do differ

    versions = {world.bundles[name].digest: name for name in ("other", "second")}
    used = set()
    assert len(answers) >= len(jobs) + NUM_KEEPERS
    for (model, index), response in answers:
        assert response.model == model
        expected = model
        if model != "base":
            trace = trace_of(response)
            assert trace["bundle"] == model
            if model == "moving":
                version = versions[trace["digest"]]
                used.add(version)
                expected = "before" if version == "other" else "second"
            else:
                assert trace["digest"] == world.bundles[model].digest
        tokens, logprobs = tokens_and_logprobs(response)
        assert tokens == alone[expected, index][0]
        assert logprobs == pytest.approx(alone[expected, index][1], abs=TOLERANCE)
    assert used == {"other", "second"}
