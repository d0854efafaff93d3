"""What a model is worth as a judge, and its threshold: measured on pairs of questions that the package has."""

import json
import math
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Final, NamedTuple

from ..facts.language import language_of
from ..facts.question import read
from ..facts.rule import compare
from .prompt import Pair

PAIRS: Final = Path(__file__).parent / "pairs.jsonl"
LEAST_AUROC: Final = 0.95
MOST_PASSED: Final = 0.01  # of the pairs that are two questions
ENOUGH: Final = 40  # pairs
HOPELESS: Final = 0.75  # AUROC of so many
LEAST_ODDS: Final = 0.0  # a threshold is not below it, whatever the pairs say


class Ability(NamedTuple):
    """What a model is worth as a judge."""

    auroc: float  # that it ranks a pair of one question above one of two
    threshold: float  # with which at most `MOST_PASSED` of the others pass
    found: float  # share of the pairs of one question that pass then
    passed: float  # share of the others

    @property
    def is_able(self) -> bool:
        return self.auroc >= LEAST_AUROC and self.found > 0


class KnownPair(NamedTuple):
    """What a model is measured on."""

    pair: Pair
    is_same: bool
    is_open: bool  # words leave it open, so that a judge decides


@cache
def known_pairs() -> tuple[KnownPair, ...]:
    rows = map(json.loads, PAIRS.read_text(encoding="utf-8").splitlines())
    return tuple(_known(Pair(row["question"], row["asked"]), bool(row["same"])) for row in rows)


def _known(pair: Pair, is_same: bool) -> KnownPair:
    language = language_of(pair.stored)
    compared = compare(read(pair.stored, language), read(pair.asked, language), language)
    return KnownPair(pair, is_same, not compared.is_same and compared.differs is None)


def auroc(odds: Sequence[float]) -> float:
    """That a pair of one question ranks above one of two, among the first of `known_pairs`."""
    same, other = _apart(odds)
    ranked = sum((one > two) + 0.5 * (one == two) for one in same for two in other)
    return ranked / (len(same) * len(other))


def is_hopeless(odds: Sequence[float]) -> bool:
    """Whether the first of `known_pairs` tell already that a model is not able."""
    return len(odds) >= ENOUGH and auroc(odds) < HOPELESS


def ability(odds: Sequence[float]) -> Ability:
    """From the odds of `known_pairs`, in their order; of the first of them, if these are enough."""
    known = list(zip(odds, known_pairs(), strict=False))
    passing = sorted((each for each, pair in known if pair.is_open and not pair.is_same), reverse=True)
    highest = passing[int(MOST_PASSED * len(_apart(odds)[1]))]
    threshold = max(math.nextafter(highest, math.inf), LEAST_ODDS)
    return Ability(auroc(odds), threshold, *prices(odds, threshold))


def _apart(odds: Sequence[float]) -> tuple[list[float], list[float]]:
    """Those of pairs of one question, and of two."""
    known = list(zip(odds, known_pairs(), strict=False))
    return [each for each, pair in known if pair.is_same], [each for each, pair in known if not pair.is_same]


def prices(odds: Sequence[float], threshold: float) -> tuple[float, float]:
    """The shares of the known pairs of one question, and of two, that are answered with a threshold."""
    passed = [pair for each, pair in zip(odds, known_pairs(), strict=False) if pair.is_open and each >= threshold]
    same, other = map(len, _apart(odds))
    found = sum(pair.is_same for pair in passed)
    return found / same, (len(passed) - found) / other
