"""Which facts a request asks for, and which it is answered with.

Shapes: T tokens of an answer.
"""

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class AskedFact:
    """A fact whose question a request asks. Gate and picture may still speak against it."""

    number: int  # among the bundle's facts
    closeness: float  # of its question to the request, up to 1
    odds: float | None = None  # the judge's log-odds that the questions are one; None: their words are


@dataclass(frozen=True)
class FactFound:
    """The fact that a request is answered with."""

    number: int  # among the bundle's facts
    closeness: float  # as that of `AskedFact`
    token_ids: tuple[int, ...] = ()  # [T], of its answer as it has to be generated, with the token that ends a turn
    withheld: str | None = None  # why the request cannot be answered by it
    odds: float | None = None  # as that of `AskedFact`


@dataclass(frozen=True)
class FactMissed:
    """The nearest fact that a request does not ask for."""

    number: int
    why: str  # the first thing in which the questions differ
    missing: tuple[str, ...]  # words of the stored question that the request does not say
    added: tuple[str, ...]  # words of the request that the stored question does not say
    odds: float | None = None  # as that of `AskedFact`


@dataclass(frozen=True)
class AskedFacts:
    """What a request's text asks for, of one bundle."""

    facts: tuple[AskedFact, ...] = ()  # the surest first
    missed: FactMissed | None = None  # the nearest, if none is asked for


NO_FACTS: Final = AskedFacts()
