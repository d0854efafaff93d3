"""The model that serves, as a judge of facts: whether a request asks a stored question in other words.

It is asked through the engine like by any client, for one token, and first in line (`scheduler.py`); its instruction
lies in the prefix cache. Whether it is able is measured once, when the first request may ask for a fact; until then,
and if it is not, only what words tell is said.

Each pair is asked in both directions, and what is known of a pair is kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Final

from cachetools import LRUCache
from vllm.outputs import RequestOutput
from vllm.sampling_params import SamplingParams
from vllm.tokenizers import TokenizerLike

from ..facts import Pair
from ..facts.judge import Ability, JudgePrompt, ability, log_odds
from ..protocol import JUDGE

KEPT_PAIRS: Final = 1 << 16
NOT_MEASURED: Final = "it is measured now whether the model can judge other wordings"


class Judged:
    """What a model says of pairs, as far as it is known, and what it is worth."""

    def __init__(self, tokenizer: TokenizerLike, threshold: float | None = None) -> None:
        """`threshold` of log-odds, instead of the measured one."""
        self.prompt = JudgePrompt(tokenizer)
        self._threshold = threshold
        self._odds: LRUCache[Pair, float] = LRUCache(KEPT_PAIRS)
        self.ability: Ability | None = None  # None until it is measured

    @property
    def threshold(self) -> float:
        assert self.ability is not None
        return self.ability.threshold if self._threshold is None else self._threshold

    @property
    def may_judge(self) -> bool:
        """An operator's threshold stands for what is measured."""
        return self.ability is not None and (self.ability.is_able or self._threshold is not None)

    @property
    def why_not(self) -> str:
        """Why it does not judge."""
        return NOT_MEASURED if self.ability is None else "the model cannot judge other wordings"

    @cached_property
    def params(self) -> SamplingParams:
        tokens = [self.prompt.yes, self.prompt.no]
        return SamplingParams(max_tokens=1, temperature=0, logprob_token_ids=tokens, extra_args={JUDGE: True})

    def new(self, pairs: Iterable[Pair]) -> list[Pair]:
        """Those that have to be asked."""
        return [pair for pair in dict.fromkeys(pairs) if pair not in self._odds]

    def prompts(self, pairs: Sequence[Pair]) -> list[list[int]]:
        """In both directions."""
        return [self.prompt.token_ids(each) for pair in pairs for each in (pair, Pair(pair.asked, pair.stored))]

    def take(self, pairs: Sequence[Pair], outputs: Sequence[RequestOutput]) -> None:
        """What was said to `prompts`."""
        odds = list(map(self._odds_in, outputs))
        self._odds.update({pair: min(odds[2 * n : 2 * n + 2]) for n, pair in enumerate(pairs)})

    def known(self, pairs: Iterable[Pair]) -> dict[Pair, float]:
        return {pair: self._odds[pair] for pair in pairs if pair in self._odds}

    def measure(self, outputs: Sequence[RequestOutput]) -> Ability:
        """From what was said to the prompts of `known_pairs`."""
        odds = list(map(self._odds_in, outputs))
        self.ability = ability([min(odds[n : n + 2]) for n in range(0, len(odds), 2)])
        return self.ability

    def _odds_in(self, output: RequestOutput) -> float:
        logprobs = output.outputs[0].logprobs
        assert logprobs
        return log_odds(*(logprobs[0][token].logprob for token in (self.prompt.yes, self.prompt.no)))
