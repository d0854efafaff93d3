"""Questions asked of servers: chat completions, greedy, a handful at once, the pictures inside the requests.

A bundle is loaded over InduceKV's own routes, an adapter over vLLM's. Both name a path.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple

import httpx

from benchmarks.research.continual.answering.offline import OfflineAnswerer
from benchmarks.research.continual.answering.plans import AnsweringModel, Ask, Plan, plan
from benchmarks.research.continual.methods import Artifact
from benchmarks.research.continual.methods.method import Kind
from benchmarks.research.continual.suites.suite import NEW_TOKENS
from selector.client import Server, ServerError, messages_of
from selector.data.examples import Example

Loadable = Literal["bundle", "adapter"]
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
        if what == "adapter":
            self._adapter("load", lora_name=name, lora_path=place)
        else:
            with failing():
                server_at(self.url).load(name, place)
        return name

    def unload(self, what: Loadable, name: str) -> None:
        """Raises EndpointFailed: it does not answer, or refuses."""
        if what == "adapter":
            self._adapter("unload", lora_name=name)
        else:
            with failing():
                server_at(self.url).unload(name)

    def _adapter(self, verb: Literal["load", "unload"], **body: str) -> None:
        """vLLM's own routes, which answer in plain text."""
        address = f"{self.url}/v1/{verb}_lora_adapter"
        try:
            response = httpx.post(address, json=body, timeout=SECONDS)
        except httpx.HTTPError as error:
            raise EndpointFailed(f"{address} does not answer ({type(error).__name__}: {error})") from error
        if response.is_error:
            said = " ".join(response.text.split())[:500]
            raise EndpointFailed(f"{address}: HTTP {response.status_code}: {said}")


def server_at(url: str) -> Server:
    return replace(Server.from_environment(url), timeout_s=SECONDS)


@contextmanager
def failing() -> Iterator[None]:
    """Raises EndpointFailed for what a server refuses: it ends the run, where an InduceKVError ends one stream."""
    try:
        yield
    except ServerError as error:
        raise EndpointFailed(str(error)) from error


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
            return self._ask_all(asks, models)

    def _ask_all(self, asks: Sequence[Ask], models: Sequence[Served]) -> list[str]:
        texts = [ask.answer or "" for ask in asks]
        # Questions of one model go together: a server holds only so many adapters at once.
        rows = sorted((row for row, ask in enumerate(asks) if ask.answer is None), key=lambda row: models[row])
        with ThreadPoolExecutor(self.concurrency) as workers:
            answers = workers.map(lambda row: ask_one(models[row], asks[row], self.new_tokens), rows)
            for row, text in zip(rows, answers, strict=True):
                texts[row] = text
        return texts


def ask_one(model: Served, ask: Ask, new_tokens: int, attempts: int = ATTEMPTS) -> str:
    """The text of the answer. Raises EndpointFailed."""
    try:
        answer = server_at(model.url).ask(model.name, messages_of(ask.conversation), max_tokens=new_tokens)
    except ServerError as error:
        # A greedy question can be asked twice; a server that takes too long is not asked again.
        if attempts > 1 and error.status is None and not isinstance(error.__cause__, TimeoutError):
            return ask_one(model, ask, new_tokens, attempts - 1)
        raise EndpointFailed(f"question {ask.example.id!r}: {error}") from error
    return answer.text.strip()
