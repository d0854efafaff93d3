"""How a stored answer is said: token by token, whatever the sampling.

A fact that is found is beyond doubt, so the next token is that of its answer as long as what is generated agrees with
it: kNN-LM [https://arxiv.org/abs/1911.00172] with all of the weight on what is stored. Then the model goes on alone, as
it does from a token that is ruled out.

Shapes: V vocabulary, T tokens of an answer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class FactFound:
    """The fact that a request asks for."""

    number: int  # among the bundle's facts
    closeness: float  # of its question to the request, up to 1
    token_ids: tuple[int, ...] = ()  # [T], of its answer as it has to be generated, with the token that ends a turn
    withheld: str | None = None  # why the request cannot be answered by it

    @classmethod
    def parse(cls, raw: Mapping[str, Any]) -> FactFound:
        """From JSON, as `dataclasses.asdict` gives it."""
        ids = tuple(map(int, raw["token_ids"]))
        return cls(int(raw["number"]), float(raw["closeness"]), ids, raw["withheld"])


@dataclass(frozen=True)
class FactMissed:
    """The nearest fact that a request does not ask for."""

    number: int
    why: str  # the first thing in which the questions differ
    missing: tuple[str, ...]  # words of the stored question that the request does not say
    added: tuple[str, ...]  # words of the request that the stored question does not say

    @classmethod
    def parse(cls, raw: Mapping[str, Any]) -> FactMissed:
        """From JSON, as `dataclasses.asdict` gives it."""
        return cls(int(raw["number"]), str(raw["why"]), tuple(raw["missing"]), tuple(raw["added"]))


def next_token(answer: Sequence[int], generated: Sequence[int]) -> int | None:
    """What follows in the answer; None once something else was generated, or it is complete."""
    length = len(generated)
    return answer[length] if length < len(answer) and tuple(answer[:length]) == tuple(generated) else None


def said(logits: Tensor, token: int) -> Tensor:
    """log p for one row of logits [V]: the token is certain, unless it is ruled out, with a logit of -inf."""
    if logits[token] == -math.inf:
        return logits
    certain = logits.new_full(logits.shape, -math.inf)
    certain[token] = 0.0
    return certain
