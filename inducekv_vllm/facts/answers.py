"""How stored answers enter the next token's distribution, as in kNN-LM [https://arxiv.org/abs/1911.00172].

    p = (1 - w) p_model + w p_stored

p_stored follows the stored answers that agree with what is generated so far; once none of them does, the model goes on
alone. w grows with the score of the question that was found: 1/2 at the threshold, 0.99 at 1.

Shapes: V vocabulary, n answers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

SURE: Final = 0.99  # w at the score 1
SPREAD: Final = 0.02  # scores that differ by it have shares that differ by a factor of e
MOST_ANSWERS: Final = 4


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


def weight_of(score: float, threshold: float) -> float:
    """w for a question that was found with this score, at least the threshold, which is below 1."""
    steepness = math.log(SURE / (1 - SURE)) / (1 - threshold)
    return 1 / (1 + math.exp(-steepness * (min(score, 1.0) - threshold)))


def answers_of(scores: Sequence[float], token_ids: Sequence[Sequence[int]], threshold: float) -> Answers | None:
    """The answers that are found, the best first; None if no score reaches the threshold."""
    found = [(score, ids) for score, ids in zip(scores, token_ids, strict=True) if score >= threshold][:MOST_ANSWERS]
    if not found:
        return None
    best = found[0][0]
    odds = [math.exp((score - best) / SPREAD) for score, _ in found]
    shares = tuple(each / sum(odds) for each in odds)
    return Answers(weight_of(best, threshold), shares, tuple(tuple(ids) for _, ids in found))


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
