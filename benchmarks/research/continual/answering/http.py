"""Questions asked of servers: chat completions, greedy, a handful at once, the pictures inside the requests.

A bundle is loaded over InduceKV's own routes, an adapter over vLLM's. Both name a path.
"""

from __future__ import annotations

import asyncio
import os
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import httpx

from benchmarks.chat import messages_of
from benchmarks.research.continual.answering.offline import OfflineAnswerer
from benchmarks.research.continual.answering.plans import AnsweringModel, Ask, Plan, plan
from benchmarks.research.continual.methods import Artifact
from benchmarks.research.continual.methods.method import Kind
from benchmarks.research.continual.suites.suite import NEW_TOKENS
from inducekv_vllm.vllm_seams.config import ADMIN_HEADER, ADMIN_KEY_VARIABLE
from selector.data.examples import Example

Loadable = Literal["bundle", "adapter"]
LOAD_ROUTES: Mapping[Loadable, str] = {"bundle": "/v1/load_memory_bundle", "adapter": "/v1/load_lora_adapter"}
# What an artifact of each kind has to have loaded before it can answer.
LOADS: Mapping[Kind, Loadable | None] = {
    "none": None,
    "exemplars": None,
    "copier": None,
    "bundle": "bundle",
    "adapter": "adapter",
    "gated_adapter": "adapter",
    "gated_adapters": "adapter",
    "attached": None,
}
SECONDS = 300.0  # for any one request
ATTEMPTS = 3  # to ask a question whose connection breaks


class EndpointFailed(RuntimeError):
    """A server is gone or refused a request; the message names it."""


@dataclass(frozen=True)
class Endpoint:
    """Where questions are asked."""

    url: str
    model: str  # the name under which it serves the untouched model

    def load(self, what: Loadable, path: Path) -> str:
        """A new name under which what lies at `path` answers from now on. Raises EndpointFailed: it was refused."""
        name, place = f"continual-{uuid.uuid4().hex}", str(path.resolve())
        adapter, bundle = {"lora_name": name, "lora_path": place}, {"name": name, "path": place, "replace": True}
        self._post(LOAD_ROUTES[what], adapter if what == "adapter" else bundle)
        return name

    def unload(self, what: Loadable, name: str) -> None:
        """Raises EndpointFailed: it does not answer, or refuses."""
        field = "lora_name" if what == "adapter" else "name"
        self._post(LOAD_ROUTES[what].replace("/load_", "/unload_"), {field: name})

    def _post(self, route: str, body: dict[str, Any]) -> None:
        headers = {ADMIN_HEADER: os.environ.get(ADMIN_KEY_VARIABLE, "")}
        try:
            response = httpx.post(f"{self.url}{route}", json=body, headers=headers, timeout=SECONDS)
        except httpx.HTTPError as error:
            raise EndpointFailed(unreachable(self.url, error)) from error
        if response.is_error:
            raise EndpointFailed(f"{self.url}{route}: {refusal(response)}")


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
    """Answers of servers."""

    model: Path  # for the plans; the answers are the servers'
    endpoints: Endpoints
    new_tokens: int = NEW_TOKENS  # that an answer may have
    concurrency: int = 16  # requests under way at once

    def prepare(self, artifact: Artifact, state: Path) -> AnsweringModel:
        if artifact.kind == "attached":  # no server has such a model
            return OfflineAnswerer(self.model, self.new_tokens).prepare(artifact, state)
        what = LOADS[artifact.kind]
        loadable = None
        if what is not None and artifact.path is not None:
            endpoint = self.endpoints.adapters if what == "adapter" else self.endpoints.plain
            loadable = LoadableArtifact(endpoint, what, state / artifact.path)
        chosen = plan(artifact, state, self.model, new_tokens=self.new_tokens)
        return HttpModel(chosen, self.endpoints.plain, loadable, self.concurrency, self.new_tokens)


class Served(NamedTuple):
    """A model as a request names it."""

    url: str  # of its server
    name: str


@dataclass(frozen=True)
class LoadableArtifact:
    """An artifact that a server loads and unloads."""

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
            with suppress(EndpointFailed):  # if the server is gone, so is the artifact
                self.endpoint.unload(self.what, name)


@dataclass(frozen=True)
class HttpModel:
    """The untouched model and the artifact's, each on its server."""

    plan: Plan
    untouched: Endpoint
    artifact: LoadableArtifact | None
    concurrency: int
    new_tokens: int = NEW_TOKENS

    def answers(self, examples: Sequence[Example]) -> list[str]:
        """Loads what the questions need, asks them, and unloads it."""
        asks = self.plan.asks(examples)
        with ExitStack() as stack:
            parts = {ask.adapter for ask in asks if ask.with_artifact}
            assert self.artifact is not None or not parts, "a plan asks the model of an artifact that has none"
            served = {part: stack.enter_context(self.artifact.loaded(part)) for part in parts}
            untouched = Served(self.untouched.url, self.untouched.model)
            models = [served[ask.adapter] if ask.with_artifact else untouched for ask in asks]
            return asyncio.run(self._ask_all(asks, models))

    async def _ask_all(self, asks: Sequence[Ask], models: Sequence[Served]) -> list[str]:
        texts = [ask.answer or "" for ask in asks]
        # Questions of one model go together: a server holds only so many adapters at once.
        rows = sorted((row for row, ask in enumerate(asks) if ask.answer is None), key=lambda row: models[row])
        waiting = iter(rows)

        async def worker(client: httpx.AsyncClient) -> None:
            for row in waiting:  # shared by all workers: each takes the next one when it is free
                texts[row] = await ask_one(client, models[row], asks[row], self.new_tokens)

        transport = httpx.AsyncHTTPTransport(retries=2)  # of connections alone
        try:
            async with (
                httpx.AsyncClient(transport=transport, timeout=SECONDS) as client,
                asyncio.TaskGroup() as group,
            ):
                for _ in range(self.concurrency):
                    group.create_task(worker(client))
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
        return texts


async def ask_one(client: httpx.AsyncClient, model: Served, ask: Ask, new_tokens: int) -> str:
    """The text of the answer. Raises EndpointFailed."""
    messages = messages_of(ask.conversation)
    body = {"model": model.name, "messages": messages, "temperature": 0.0, "max_tokens": new_tokens}
    for left in reversed(range(ATTEMPTS)):
        try:
            response = await client.post(f"{model.url}/v1/chat/completions", json=body)
            break
        except httpx.HTTPError as error:
            # A server may close an idle connection just as it is used again; a greedy question can be asked twice.
            if not (left and isinstance(error, httpx.ReadError | httpx.WriteError | httpx.RemoteProtocolError)):
                raise EndpointFailed(unreachable(model.url, error)) from error
    if response.is_error:
        raise EndpointFailed(f"{model.url}: question {ask.example.id!r}: {refusal(response)}")
    return (response.json()["choices"][0]["message"]["content"] or "").strip()


def refusal(response: httpx.Response) -> str:
    """The status and the beginning of what the server said."""
    return f"HTTP {response.status_code}: {' '.join(response.text.split())[:500]}"


def unreachable(url: str, error: httpx.HTTPError) -> str:
    return f"{url} does not answer ({type(error).__name__}: {error})"
