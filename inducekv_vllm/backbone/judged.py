"""What a model says as a judge of facts, as far as it is known, and what it is worth.

Each pair of questions is asked in both directions, and the smaller odds count. They are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final

from cachetools import LRUCache
from transformers import PreTrainedTokenizerBase

from ..facts import Pair
from ..facts.judge import Ability, JudgePrompt, ability, known_pairs

KEPT_PAIRS: Final = 1 << 16
NOT_MEASURED: Final = "it is measured now whether the model can judge other wordings"
NOT_ABLE: Final = "the model cannot judge other wordings"
Prompts = list[list[int]]  # in tokens


class Judged:
    """See the module docstring. Whoever asks the model tells it what was said."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, threshold: float | None = None) -> None:
        """`threshold` of log-odds, instead of the measured one."""
        self.prompt = JudgePrompt(tokenizer)
        self._threshold = threshold
        self._odds: LRUCache[Pair, float] = LRUCache(KEPT_PAIRS)
        self.ability: Ability | None = None  # None until it is measured

    @property
    def threshold(self) -> float:
        return self._threshold if self._threshold is not None else self.ability.threshold if self.ability else 0.0

    @property
    def may_judge(self) -> bool:
        """An operator's threshold stands for what is measured."""
        return self.ability is not None and (self.ability.is_able or self._threshold is not None)

    @property
    def why_not(self) -> str:
        """Why it does not judge."""
        return NOT_MEASURED if self.ability is None else NOT_ABLE

    def new(self, pairs: Iterable[Pair]) -> list[Pair]:
        """Those that have to be asked."""
        return [pair for pair in dict.fromkeys(pairs) if pair not in self._odds]

    def prompts(self, pairs: Sequence[Pair]) -> Prompts:
        """In both directions."""
        return [self.prompt.token_ids(each) for pair in pairs for each in (pair, Pair(pair.asked, pair.stored))]

    def take(self, pairs: Sequence[Pair], odds: Sequence[float]) -> None:
        """The odds of `prompts`."""
        self._odds.update(zip(pairs, _smaller(odds), strict=True))

    def known(self, pairs: Iterable[Pair]) -> dict[Pair, float]:
        return {pair: self._odds[pair] for pair in pairs if pair in self._odds}

    def measured(self, odds: Sequence[float]) -> Ability:
        """From the odds of the prompts of `known_pairs`."""
        self.ability = ability(_smaller(odds))
        return self.ability

    def odds(self, pairs: Sequence[Pair], ask: Callable[[Prompts], Sequence[float]]) -> dict[Pair, float]:
        """Of pairs, if the model is able, which is measured the first time."""
        if not pairs:
            return {}
        if self.ability is None:
            self.measured(ask(self.prompts([each.pair for each in known_pairs()])))
        if self.may_judge and (new := self.new(pairs)):
            self.take(new, ask(self.prompts(new)))
        return self.known(pairs)


def _smaller(odds: Sequence[float]) -> list[float]:
    return [min(odds[at : at + 2]) for at in range(0, len(odds), 2)]
