"""How stored answers enter the next token's distribution, as in kNN-LM [https://arxiv.org/abs/1911.00172].

    p = (1 - w) p_model + w p_stored

p_stored follows the stored answer as long as it agrees with what is generated so far; then the model goes on alone. A
fact that is found is beyond doubt, so w is 1: the answer is said as it is stored, whatever the sampling. What is ruled
out, by a grammar or by the request, stays so.

Shapes: V vocabulary, n answers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

@dataclass(frozen=True)
class Answers:
    """What a request's stored answers are, in tokens, and how much they count."""

    weight: float  # w
    shares: tuple[float, ...]  # [n], of w; they sum to 1
    token_ids: tuple[tuple[int, ...], ...]  # [n], each with the token that ends a turn


@dataclass(frozen=True)
class FactsFound:
    """The facts that a request asks for, the closest first."""

    facts: tuple[int, ...]  # [n], their numbers in the bundle
    score: float  # of the first
    answers: Answers

    @classmethod
    def parse(cls, raw: Mapping[str, Any]) -> FactsFound:
        """From JSON, as `dataclasses.asdict` gives it."""
        answers = raw["answers"]
        ids = tuple(tuple(map(int, each)) for each in answers["token_ids"])
        shares = tuple(map(float, answers["shares"]))
        return cls(tuple(map(int, raw["facts"])), float(raw["score"]), Answers(float(answers["weight"]), shares, ids))


def next_tokens(answers: Answers, generated: Sequence[int]) -> dict[int, float]:
    """p_stored after these tokens; empty if no answer goes on after them."""
    length, shares = len(generated), dict[int, float]()
    for share, ids in zip(answers.shares, answers.token_ids, strict=True):
        if len(ids) > length and ids[:length] == tuple(generated):
            shares[ids[length]] = shares.get(ids[length], 0.0) + share
    total = sum(shares.values())
    return {token: share / total for token, share in shares.items()}


def mixed(logits: Tensor, weight: float, stored: Mapping[int, float]) -> Tensor:
    """log p for one row of logits [V] and p_stored. Tokens that are ruled out, with logits of -inf, stay so."""
    if not stored:
        return logits
    p_stored = torch.zeros_like(logits, dtype=torch.float32)
    p_stored[list(stored)] = torch.tensor(list(stored.values()), device=logits.device)
    return mixed_rows(logits[None], torch.tensor([weight], device=logits.device), p_stored[None])[0]


def mixed_rows(logits: Tensor, weights: Tensor, stored: Tensor) -> Tensor:
    """log p for n rows: logits [n, V], w [n] float32 and p_stored [n, V] float32. Nothing is read back to the host."""
    stored = stored.masked_fill(logits == -math.inf, 0.0)
    weights = weights[:, None] * stored.sum(1, keepdim=True)  # what is ruled out is left to the model
    stored = stored / stored.sum(1, keepdim=True).clamp_min(1e-30)
    p = (1 - weights) * logits.float().softmax(1) + weights * stored
    return torch.where(logits == -math.inf, logits, p.log()).to(logits.dtype)
