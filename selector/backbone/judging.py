"""The frozen model as a judge of facts, as a server asks it (`inducekv_vllm.backbone.judged`).

Shapes: n prompts, T tokens of the longest behind what they begin with alike.
"""

import itertools
from collections.abc import Sequence
from copy import deepcopy
from typing import Any, Final

import torch

from inducekv_vllm.backbone.judged import Judged
from inducekv_vllm.judge import JudgePrompt, Pair, log_odds

from .model import Backbone

AT_ONCE: Final = 8


class BackboneJudge:
    """Asks a model in transformers. Whether it is able is measured with the first pairs."""

    def __init__(self, backbone: Backbone) -> None:
        self._backbone = backbone
        self.judged, self._prompt = Judged(), JudgePrompt(backbone.tokenizer)
        self._begun: tuple[Sequence[int], Any] = ((), None)  # what prompts begin with, and its cache

    def odds(self, pairs: Sequence[Pair]) -> dict[Pair, float]:
        return self.judged.odds(pairs, self.said)

    def said(self, pairs: Sequence[Pair]) -> list[float]:
        """Log-odds of yes, for each pair."""
        prompts = [self._prompt.token_ids(pair) for pair in pairs]
        return [each for at in range(0, len(prompts), AT_ONCE) for each in self._said(prompts[at : at + AT_ONCE])]

    @torch.no_grad()
    def _said(self, prompts: Sequence[list[int]]) -> list[float]:
        head = self._head(prompts)
        rests = [ids[len(head) :] for ids in prompts]
        longest = max(map(len, rests))
        cache = deepcopy(self._begun[1])
        cache.batch_repeat_interleave(len(prompts))
        ids = torch.tensor([[*rest, *[0] * (longest - len(rest))] for rest in rests], device=self._backbone.device)
        places = torch.arange(len(head), len(head) + longest, device=self._backbone.device)  # [T]
        logits = self._backbone.model(input_ids=ids, past_key_values=cache, cache_position=places).logits  # [n, T, V]
        last = torch.stack([row[len(rest) - 1] for row, rest in zip(logits, rests, strict=True)])  # [n, V]
        said = last[:, [self._prompt.yes, self._prompt.no]].float()
        return [log_odds(yes, no) for yes, no in said.tolist()]

    def _head(self, prompts: Sequence[list[int]]) -> Sequence[int]:
        """What these prompts begin with alike, which is computed once for many."""
        known = self._begun[0]
        if known and all(ids[: len(known)] == known and len(ids) > len(known) for ids in prompts):
            return known
        ends = [*prompts, self._prompt.token_ids(Pair("?", "?"))] if len(prompts) == 1 else prompts
        same = itertools.takewhile(lambda column: len(set(column)) == 1, zip(*ends, strict=False))
        head = [column[0] for column in same][: min(map(len, prompts)) - 1]
        ids = torch.tensor([head], device=self._backbone.device)
        self._begun = (head, self._backbone.model(input_ids=ids, use_cache=True).past_key_values)
        return head
