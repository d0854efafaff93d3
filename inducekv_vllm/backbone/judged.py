"""What a judge of facts says, as far as it is known, and what it is worth.

The judge is the model that serves, or a classifier of pairs (`pair_classifier.py`): whoever asks it knows how.

Each pair of questions is asked in both directions. The smaller odds have `SMALLER` of the weight, the others the rest.
A pair that one direction refuses by `MARGIN` is not asked in the other. The odds are kept.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

from cachetools import LRUCache

from ..judge import Pair
from ..judge.ability import ENOUGH, Ability, ability, is_hopeless, known_pairs, prices

KEPT_PAIRS: Final = 1 << 16
SMALLER: Final = 0.75  # of the weight; with all of it fewer of the package's wordings pass, with half of it more others
MARGIN: Final = 1.0  # below the threshold; of the public sets' pairs no true one that passes is so far below it
NOT_MEASURED: Final = "it is measured now whether the model can judge other wordings"
NO_ROOM: Final = "the model's context has no room for the judge's question"
NOT_ABLE: Final = "the model cannot judge other wordings"
Ask = Callable[[Sequence[Pair]], Sequence[float]]  # the log-odds that the second of a pair asks what the first asks


class Judged:
    """See the module docstring. Whoever asks the judge tells it what was said."""

    def __init__(self, threshold: float | None = None, *, has_room: bool = True) -> None:
        """
        Args:
            threshold: of log-odds, instead of the measured one.
            has_room: whether the judge's context has room for a pair.
        """
        self._has_room, self._threshold = has_room, threshold
        self._odds: LRUCache[Pair, float] = LRUCache(KEPT_PAIRS)
        self.ability: Ability | None = None  # None until it is measured
        self.is_asked = False  # whether it has to be
        self._measured: list[float] = []  # the odds of the known pairs

    @property
    def threshold(self) -> float:
        return self._threshold if self._threshold is not None else self.ability.threshold if self.ability else 0.0

    @property
    def may_judge(self) -> bool:
        """An operator's threshold stands for what is measured."""
        is_able = self._threshold is not None or (self.ability is not None and self.ability.is_able)
        return is_able and self._has_room

    @property
    def why_not(self) -> str:
        """Why it does not judge."""
        if not self._has_room:
            return NO_ROOM
        return NOT_MEASURED if self.ability is None else NOT_ABLE

    @property
    def is_to_be_measured(self) -> bool:
        return self.ability is None and self._has_room

    @property
    def prices(self) -> tuple[float, float]:
        """The shares of the known pairs of one question, and of two, that pass the threshold."""
        return prices(self._measured, self.threshold)

    def new(self, pairs: Iterable[Pair]) -> list[Pair]:
        """Those that have to be asked."""
        return [pair for pair in dict.fromkeys(pairs) if pair not in self._odds]

    @staticmethod
    def both_ways(pairs: Sequence[Pair]) -> list[Pair]:
        """What is asked about pairs: each of them, and the same turned round."""
        return [each for pair in pairs for each in (pair, pair.turned)]

    def open(self, odds: Mapping[Pair, float]) -> list[Pair]:
        """Those that have to be asked in the other direction, too."""
        return [pair for pair, each in odds.items() if each >= self.threshold - MARGIN]

    def take(self, odds: Mapping[Pair, float], turned: Mapping[Pair, float]) -> None:
        """What was said of pairs, and of those of them that were turned round."""
        self._odds.update({pair: weighed(each, turned.get(pair, each)) for pair, each in odds.items()})

    def known(self, pairs: Iterable[Pair]) -> dict[Pair, float]:
        return {pair: self._odds[pair] for pair in pairs if pair in self._odds}

    def measure(self, ask: Ask) -> None:
        """Ask about known pairs, until it is clear."""
        odds = list[float]()
        for part in self.parts():
            odds += ask(self.both_ways(part))
            if self.is_hopeless(odds):
                break
        self.measured(odds)

    @staticmethod
    def parts() -> list[list[Pair]]:
        """What a model is measured on, to be asked part by part."""
        pairs = [each.pair for each in known_pairs()]
        return [pairs[at : at + ENOUGH] for at in range(0, len(pairs), ENOUGH)]

    @staticmethod
    def is_hopeless(odds: Sequence[float]) -> bool:
        """Whether the odds of the first pairs tell already that the model is not able."""
        return is_hopeless(_weighed(odds))

    def measured(self, odds: Sequence[float]) -> Ability:
        """From the odds of both ways of the first of `known_pairs`."""
        self._measured = _weighed(odds)
        self.ability = ability(self._measured)
        return self.ability

    def odds(self, pairs: Sequence[Pair], ask: Ask) -> dict[Pair, float]:
        """Of pairs, if the model is able, which is measured the first time."""
        if not pairs:
            return {}
        if self.is_to_be_measured and not self.may_judge:
            self.measure(ask)
        if self.may_judge and (new := self.new(pairs)):
            odds = dict(zip(new, ask(new), strict=True))
            again = self.open(odds)
            self.take(odds, dict(zip(again, ask([pair.turned for pair in again]), strict=True)) if again else {})
        return self.known(pairs)


def weighed(one: float, other: float) -> float:
    """The odds of a pair, from those of its directions."""
    return SMALLER * min(one, other) + (1 - SMALLER) * max(one, other)


def _weighed(odds: Sequence[float]) -> list[float]:
    return [weighed(*odds[at : at + 2]) for at in range(0, len(odds), 2)]
