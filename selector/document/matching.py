"""Attention matching: a few keys and values that queries cannot tell from those of a whole text, in closed form.

Zweiger, Guo, Fu and Kim, "Fast KV Compaction via Attention Matching", 2026 (arXiv:2602.16284), for one KV head of one
layer. A query q sees of keys k_i a mass sum_i exp(q k_i), and of their values an output. Beside its request's own
tokens, of mass s and output o, attention gives (mass * output + s o) / (mass + s). What is kept is to give the same.

A kept key stands for others, too: the paper gives it a bias. Here the key itself is moved, so that nothing but keys and
values is stored and served: see `direction`.

Shapes: R queries, N keys of the text, t of them that are kept, D and V sizes of a key and a value. All float32.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor

LEAST_BIAS, MOST_BIAS = -6.0, 8.0  # of a key: the logarithm of how many keys it stands for
ROUNDS: Final = 64  # of a pursuit, at most: later ones take several keys at once
STEPS: Final = 200  # of projected gradients
RIDGE: Final = 1e-3  # of the mean square of a column
HELD_OUT: Final = 5  # one query in so many tells what was lost, and is not fitted


@dataclass(frozen=True)
class Queries:
    """What asks about the text, and what it sees beside the text."""

    queries: Tensor  # [R, D], times the softmax scale
    own_mass: Tensor  # [R], its logarithm
    own_output: Tensor  # [R, V]

    def rows(self, rows: slice | Tensor) -> Queries:
        return Queries(self.queries[rows], self.own_mass[rows], self.own_output[rows])


@dataclass(frozen=True)
class Kept:
    """What is kept of a text."""

    rows: Tensor  # [t] int64, ascending: whose keys
    keys: Tensor  # [t, D]
    values: Tensor  # [t, V]
    lost: float  # of what the text adds to the outputs of attention: the share of squares that is not there


def kept(queries: Queries, keys: Tensor, values: Tensor, t: int) -> Kept:
    """The better of the keys that are looked at most and those of a pursuit, with values that give the same outputs.

    Args:
        keys: [N, D]; the first one, at which attention rests, is always kept.
        values: [N, V].
    """
    held_out = torch.zeros(len(queries.queries), dtype=torch.bool)
    held_out[HELD_OUT - 1 :: HELD_OUT] = True
    fitted, asked = queries.rows(~held_out), queries.rows(held_out if held_out.any() else ~held_out)
    share = _shares(fitted, keys)  # [R, N]
    target = share.sum(dim=1)  # [R]: of the text in all that a query sees
    same = direction(fitted.queries, target)
    found = []
    for rows in (by_attention(share, t), by_pursuit(share, target, t)):
        bias = nnls(share[:, rows], target).log().clamp(LEAST_BIAS, MOST_BIAS)  # [t]
        chosen = Kept(rows, keys[rows] + bias[:, None] * same, values[rows], math.nan)
        chosen = replace(chosen, values=_values(fitted, keys, values, chosen))
        found.append(replace(chosen, lost=lost(asked, keys, values, chosen)))
    return min(found, key=lambda each: each.lost)


def direction(queries: Tensor, weight: Tensor) -> Tensor:
    """The u [D] with q u = 1 for all queries [R, D], as nearly as weighted least squares come.

    Queries of a head have much in common, so a key k + b u has the logit q k + b of a key with a bias of its own.

    Args:
        weight: [R], of a query.
    """
    weighted = queries * weight[:, None]
    gram = weighted.T @ weighted
    return _solved(gram, weighted.T @ weight)


def by_attention(share: Tensor, t: int) -> Tensor:
    """The first key and the t - 1 others that are looked at most, by the root of the mean square: [t] int64."""
    looked = share.square().sum(dim=0)  # [N]
    looked[0] = torch.inf
    return looked.topk(t).indices.sort().values


def by_pursuit(share: Tensor, target: Tensor, t: int) -> Tensor:
    """Orthogonal matching pursuit: the keys whose shares, weighted, add up best to the target [R]: [t] int64."""
    gram, onto = share.T @ share, share.T @ target  # [N, N] and [N]
    rows, left = torch.zeros(1, dtype=torch.int64, device=onto.device), onto.clone()
    while len(rows) < t:
        weights = _solved(gram[rows][:, rows], onto[rows]).clamp(min=0)
        left = onto - gram[:, rows] @ weights
        left[rows] = -torch.inf
        rows = torch.cat([rows, left.topk(min(math.ceil(t / ROUNDS), t - len(rows))).indices])
    return rows.sort().values


def nnls(matrix: Tensor, target: Tensor) -> Tensor:
    """The w >= 0 [t] with the least |matrix w - target|, by accelerated projected gradients (FISTA).

    Args:
        matrix: [R, t].
        target: [R].
    """
    gram, onto = matrix.T @ matrix, matrix.T @ target
    rate = 1 / torch.linalg.matrix_norm(gram).clamp(min=1e-30)  # no larger than the largest eigenvalue allows
    w = ahead = torch.ones_like(onto)
    momentum = 1.0
    for _ in range(STEPS):
        before, w = w, (ahead - rate * (gram @ ahead - onto)).clamp(min=0)
        faster = (1 + math.sqrt(1 + 4 * momentum**2)) / 2
        ahead, momentum = w + (momentum - 1) / faster * (w - before), faster
    return w


def ridge(matrix: Tensor, target: Tensor, prior: Tensor) -> Tensor:
    """The y [t, V] with the least |matrix y - target|^2 + l |y - prior|^2; l is `RIDGE` of a column's mean square.

    Args:
        matrix: [R, t].
        target: [R, V].
        prior: [t, V].
    """
    R, t = matrix.shape
    strength, missing = (RIDGE * matrix.square().sum() / t).clamp(min=1e-20), target - matrix @ prior
    if t <= R:
        moved: Tensor = torch.linalg.solve(matrix.T @ matrix + strength * torch.eye(t).to(matrix), matrix.T @ missing)
    else:
        moved = matrix.T @ torch.linalg.solve(matrix @ matrix.T + strength * torch.eye(R).to(matrix), missing)
    return prior + moved


def lost(queries: Queries, keys: Tensor, values: Tensor, chosen: Kept) -> float:
    """See `Kept.lost`; 0 if nothing looks at the text."""
    whole = _output(queries, keys, values)
    missing = (_output(queries, chosen.keys, chosen.values) - whole).square().sum()
    added = (whole - queries.own_output).square().sum()
    return float(missing / added) if added > 0 else 0.0


def _values(queries: Queries, keys: Tensor, values: Tensor, chosen: Kept) -> Tensor:
    """[t, V], for the chosen keys: outputs become those of all keys, own tokens included."""
    share = _shares(queries, chosen.keys)  # [R, t]
    own = (1 - share.sum(dim=1, keepdim=True)) * queries.own_output
    return ridge(share, _output(queries, keys, values) - own, chosen.values)


def _output(queries: Queries, keys: Tensor, values: Tensor) -> Tensor:
    """[R, V], of one softmax over these keys and the request's own."""
    share = _shares(queries, keys)
    return share @ values + (1 - share.sum(dim=1, keepdim=True)) * queries.own_output


def _shares(queries: Queries, keys: Tensor) -> Tensor:
    """[R, N], of these keys in that softmax."""
    logits = queries.queries @ keys.T
    total = torch.logaddexp(logits.logsumexp(dim=1), queries.own_mass)
    return (logits - total[:, None]).exp_()


def _solved(gram: Tensor, onto: Tensor) -> Tensor:
    """Of normal equations, [t, t] and [t], which may be singular."""
    strength = (1e-6 * gram.diagonal().mean()).clamp(min=1e-20)
    solution: Tensor = torch.linalg.solve(gram + strength * torch.eye(len(gram)).to(gram), onto)
    return solution
