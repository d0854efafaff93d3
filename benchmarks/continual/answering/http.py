"""Questions asked of a server: chat completions, greedy, a handful at once, the pictures inside the requests."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import httpx

from benchmarks.chat import messages_of
from benchmarks.continual.answering.answerer import MAX_NEW_TOKENS
from benchmarks.continual.answering.endpoint import (
    LOADS,
    SECONDS,
    Endpoint,
    EndpointFailed,
    Loadable,
    headers,
    refusal,
    unreachable,
)
from benchmarks.continual.answering.plans import Ask, Plan, plan
from benchmarks.continual.methods import Artifact
from selector.data.examples import Example

CHAT_ROUTE = "/v1/chat/completions"
ATTEMPTS = 3  # to ask a question whose connection breaks


@dataclass(frozen=True)
class Endpoints:
    """The servers of a run; may be one and the same.

    Questions to the untouched model go to the server without adapters: vLLM on CPUs gives a request without an adapter
    that of another in its batch (vllm-project/vllm#48421, in 0.32).
    """

    plain: Endpoint  # the untouched model, and memory bundles
    adapters: Endpoint


@dataclass(frozen=True)
class HttpAnswerer:
    """Answers of endpoints."""

    model: Path  # for the plans; the answers are the endpoints'
    endpoints: Endpoints
    concurrency: int = 16  # requests under way at once

    def prepare(self, artifact: Artifact, state: Path) -> HttpModel:
        what = LOADS[artifact.kind]
        loadable = None
        if what is not None and artifact.path is not None:
            endpoint = self.endpoints.adapters if what == "adapter" else self.endpoints.plain
            loadable = LoadableArtifact(endpoint, what, state / artifact.path)
        chosen = plan(artifact, state, self.model)
        return HttpModel(chosen, self.endpoints.plain, loadable, self.concurrency)


@dataclass(frozen=True)
class LoadableArtifact:
    """An artifact that an endpoint loads and unloads."""

    endpoint: Endpoint
    what: Loadable
    path: Path

    @contextmanager
    def loaded(self, part: str | None) -> Iterator[Served]:
        """Loads the whole artifact, or the subfolder `part` of its folder."""
        name = self.endpoint.load(self.what, self.path / part if part else self.path)
        try:
            yield Served(self.endpoint.url, name)
        finally:
            with suppress(EndpointFailed):  # if the endpoint is gone, so is the artifact
                self.endpoint.unload(self.what, name)


class Served(NamedTuple):
    """A model as a request names it."""

    url: str  # of its endpoint
    name: str


@dataclass(frozen=True)
class HttpModel:
    """The untouched model and the artifact's, each on its server."""

    plan: Plan
    untouched: Endpoint
    artifact: LoadableArtifact | None
    concurrency: int

    def answers(self, examples: Sequence[Example]) -> list[str]:
        """Loads what the questions need, asks them, and unloads it."""
        asks = self.plan.asks(examples)
        with self.loaded(asks) as models:
            return asyncio.run(self._ask_all(asks, models))

    @contextmanager
    def loaded(self, asks: Sequence[Ask]) -> Iterator[list[Served]]:
        """The model of each question; inside, all of them are loaded."""
        with ExitStack() as stack:
            parts = {ask.adapter for ask in asks if ask.with_artifact}
            assert self.artifact is not None or not parts, "a plan asks the model of an artifact that has none"
            served = {part: stack.enter_context(self.artifact.loaded(part)) for part in parts}
            untouched = Served(self.untouched.url, self.untouched.model)
            yield [served[ask.adapter] if ask.with_artifact else untouched for ask in asks]

    async def _ask_all(self, asks: Sequence[Ask], models: Sequence[Served]) -> list[str]:
        texts = [ask.answer or "" for ask in asks]
        # Questions of one model go together: a server holds only so many adapters at once.
        rows = sorted((row for row, ask in enumerate(asks) if ask.answer is None), key=lambda row: models[row])
        waiting = iter(rows)

        async def worker(client: httpx.AsyncClient) -> None:
            for row in waiting:  # shared by all workers: each takes the next one when it is free
                texts[row] = await ask_one(client, models[row], asks[row])

        transport = httpx.AsyncHTTPTransport(retries=2)  # of connections alone
        try:
            async with (
                httpx.AsyncClient(transport=transport, headers=headers(), timeout=SECONDS) as client,
                asyncio.TaskGroup() as group,
            ):
                for _ in range(self.concurrency):
                    group.create_task(worker(client))
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
        return texts


async def ask_one(client: httpx.AsyncClient, model: Served, ask: Ask) -> str:
    """The text of the answer. Raises EndpointFailed."""
    messages = messages_of(ask.conversation)
    body = {"model": model.name, "messages": messages, "temperature": 0.0, "max_tokens": MAX_NEW_TOKENS}
    for left in reversed(range(ATTEMPTS)):
        try:
            response = await client.post(f"{model.url}{CHAT_ROUTE}", json=body)
            break
        except httpx.HTTPError as error:
            # A server may close an idle connection just as it is used again; a greedy question can be asked twice.
            if not (left and isinstance(error, httpx.ReadError | httpx.WriteError | httpx.RemoteProtocolError)):
                raise EndpointFailed(unreachable(model.url, error)) from error
    if response.is_error:
        raise EndpointFailed(f"{model.url}: question {ask.example.id!r}: {refusal(response)}")
    return (response.json()["choices"][0]["message"]["content"] or "").strip()
