"""What a running server answers to questions, and what its gate decides on them."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from inducekv_vllm.errors import ConfigError

from ..client import Answer, Server, messages_of

if TYPE_CHECKING:
    from ..data.examples import Example

AT_ONCE: Final = 16  # requests under way


def served_name(url: str, likely: str, digest: str) -> str:
    """The name of the bundle of this digest at a server, which has several names for it perhaps.

    Raises:
        ConfigError: the server cannot be reached, or has no such bundle.
    """
    server = Server.from_environment(url)
    if (found := server.digest(likely)) == digest:
        return likely
    if (name := next((card["name"] for card in server.bundles() if card["digest"] == digest), None)) is None:
        another = "" if found is None else f"; it serves another version as {likely!r}, {found}"
        raise ConfigError(f"{url} has no bundle of the digest {digest}{another}")
    return str(name)


class Decided(NamedTuple):
    """What a gate decides on a question."""

    task: str | None  # that it is sent to
    closed: str | None  # why the gate stays closed, if it does


def served_decisions(url: str, name: str, examples: Sequence[Example]) -> list[Decided]:
    """What the gate decides on each question. Raises ConfigError: as `served_answers` and `decisions_in`."""
    return decisions_in(served_answers(url, name, examples, 1, trace=True), url)


def decisions_in(answers: Sequence[Answer], url: str) -> list[Decided]:
    """What the gate has decided on the questions of traced answers. Raises ConfigError: a trace does not say it."""
    try:
        gates = [(answer.trace or {})["gate"] for answer in answers]
        return [Decided(gate["task"], gate["closed"]) for gate in gates]
    except (KeyError, TypeError) as error:
        raise ConfigError(f"an answer of {url} has no trace of the gate") from error


def served_answers(
    url: str, model: str, examples: Sequence[Example], max_tokens: int, *, trace: bool = False
) -> list[Answer]:
    """Greedy answers, with their traces or without. Raises ConfigError: the server cannot be reached or refuses."""
    server = Server.from_environment(url)

    def answer(example: Example) -> Answer:
        return server.ask(model, messages_of(example), max_tokens=max_tokens, trace=trace)

    with ThreadPoolExecutor(AT_ONCE) as workers:
        return list(workers.map(answer, examples))


def facts_in(answers: Sequence[Answer], url: str) -> list[str | None]:
    """The id of the fact that each traced answer was said by. Raises ConfigError: a trace does not say it."""
    try:
        traces: list[Any] = [answer.trace for answer in answers]
        return [next((each["id"] for each in trace["facts"] if each["withheld"] is None), None) for trace in traces]
    except (KeyError, TypeError) as error:
        raise ConfigError(f"an answer of {url} has no trace of the facts") from error
