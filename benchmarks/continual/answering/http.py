"""Questions asked of a server: chat completions, greedy, a handful at once, the pictures inside the requests."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from benchmarks.chat import messages_of
from benchmarks.continual.methods import Artifact
from selector.backbone import Backbone
from selector.data import Example

from .answerer import MAX_NEW_TOKENS
from .endpoint import LOADS, SECONDS, Endpoint, EndpointFailed, Loadable, headers, refusal, unreachable
from .plans import Ask, Plan, plan


@dataclass(frozen=True)
class Endpoints:
    """Who is asked: with memory bundles and without, and with LoRA adapters; may be one and the same."""

    plain: Endpoint
    adapters: Endpoint

    def of(self, what: Loadable | None) -> Endpoint:
        return self.adapters if what == "adapter" else self.plain


@dataclass(frozen=True)
class HttpAnswerer:
    """Answers as an endpoint gives them."""

    model: Path  # for the plans; the answers are the endpoint's
    endpoints: Endpoints
    concurrency: int = 16  # requests under way at once

    def prepare(self, artifact: Artifact, state: Path) -> HttpModel:
        what = LOADS[artifact.kind]
        to_load = (what, state / artifact.path) if what and artifact.path else None
        chosen = plan(artifact, state, Backbone.load(self.model))
        return HttpModel(chosen, self.endpoints.of(what), to_load, self.concurrency)


@dataclass(frozen=True)
class HttpModel:
    """An endpoint that can be given the artifact."""

    plan: Plan
    endpoint: Endpoint
    artifact: tuple[Loadable, Path] | None  # to load
    concurrency: int

    def answers(self, examples: Sequence[Example]) -> list[str]:
        """Loads what the questions need, asks them, and takes it away again.

        Raises:
            EndpointFailed: the endpoint does not answer, or refuses to load or to answer, naming it.
        """
        asks = self.plan.asks(examples)
        with self.loaded(asks) as models:
            return asyncio.run(self._ask_all(asks, models))

    @contextmanager
    def loaded(self, asks: Sequence[Ask]) -> Iterator[list[str]]:
        """The name of the model that each goes to; inside, the endpoint has what they need.

        Raises:
            EndpointFailed: the endpoint does not answer, or refuses to load.
        """
        wanted = {ask.adapter for ask in asks if ask.with_artifact and ask.answer is None}
        with self._loaded(wanted) as names:
            yield [names[ask.adapter] if ask.with_artifact else self.endpoint.model for ask in asks]

    @contextmanager
    def _loaded(self, parts: set[str | None]) -> Iterator[dict[str | None, str]]:
        """Model names by part of the artifact (None: all of it)."""
        with ExitStack() as stack:
            yield {part: stack.enter_context(self._loaded_part(part)) for part in parts}

    @contextmanager
    def _loaded_part(self, part: str | None) -> Iterator[str]:
        assert self.artifact is not None, "a plan asks the artifact's model where the artifact has none"
        what, path = self.artifact
        name = self.endpoint.load(what, path / part if part else path)
        try:
            yield name
        finally:
            with suppress(EndpointFailed):  # where the endpoint is gone, so is the artifact, and it has been told
                self.endpoint.unload(what, name)

    async def _ask_all(self, asks: Sequence[Ask], models: Sequence[str]) -> list[str]:
        texts = [ask.answer or "" for ask in asks]
        # Those of one model together: a server holds only so many adapters at once.
        rows = sorted((row for row, ask in enumerate(asks) if ask.answer is None), key=lambda row: models[row])
        waiting = iter(rows)

        async def worker(client: httpx.AsyncClient) -> None:
            for row in waiting:  # shared by all workers: each takes the next one when it is free
                texts[row] = await self._ask(client, asks[row], models[row])

        transport = httpx.AsyncHTTPTransport(retries=2)  # of connections alone
        try:
            async with (
                httpx.AsyncClient(
                    base_url=self.endpoint.url, transport=transport, headers=headers(), timeout=SECONDS
                ) as client,
                asyncio.TaskGroup() as group,
            ):
                for _ in range(self.concurrency):
                    group.create_task(worker(client))
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
        return texts

    async def _ask(self, client: httpx.AsyncClient, ask: Ask, model: str) -> str:
        try:
            response = await client.post("/v1/chat/completions", json=chat_body(model, ask.conversation))
        except httpx.HTTPError as error:
            raise EndpointFailed(unreachable(self.endpoint.url, error)) from error
        if response.is_error:
            raise EndpointFailed(f"{self.endpoint.url}: question {ask.example.id!r}: {refusal(response)}")
        return (response.json()["choices"][0]["message"]["content"] or "").strip()


def chat_body(model: str, example: Example) -> dict[str, Any]:
    return {
        "model": model,
        "messages": messages_of(example),
        "temperature": 0.0,
        "max_tokens": MAX_NEW_TOKENS,
    }
