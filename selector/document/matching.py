"""Attention matching: a few keys and values that queries cannot tell from those of a whole text.

Zweiger, Guo, Fu and Kim, "Fast KV Compaction via Attention Matching", 2026 (arXiv:2602.16284), for the KV heads of one
layer. A query q sees of keys k_i a mass sum_i exp(q k_i), and of their values an output. Beside its request's own
tokens, of mass s and output o, attention gives (mass * output + s o) / (mass + s). What is kept is to give the same.

A kept key stands for others, too: the paper gives it a bias. Here the key itself is moved, so that nothing but keys and
values is stored and served: first along one direction (see `direction`), then with its value to where they miss least
(see `moved`).

Shapes: J KV heads, R queries, N keys of the text, t of them that are kept, D and V sizes of a key and a value. All
float32.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from ..runtime.cpu import rounded_products

LEAST_BIAS, MOST_BIAS = -6.0, 8.0  # of a key: the logarithm of how many keys it stands for
ROUNDS: Final = 24  # of a pursuit, at most: later ones take several keys at once
STEPS: Final = 100  # of projected gradients
RIDGE: Final = 1e-3  # of the mean square of a column
LEAST_RIDGE: Final = 1e-6  # likewise, of equations that may be singular
HELD_OUT: Final = 5  # one query in so many tells what was lost, and is not fitted
FAR: Final = 0.05  # a step, in units in which a query's logit moves by about one


@dataclass(frozen=True)
class Queries:
    """What asks about the text, and what it sees beside the text."""

    queries: Tensor  # [J, R, D], times the softmax scale
    own_mass: Tensor  # [J, R], its logarithm
    own_output: Tensor  # [J, R, V]

    def rows(self, rows: slice | Tensor) -> Queries:
        return Queries(self.queries[:, rows], self.own_mass[:, rows], self.own_output[:, rows])

    def shares(self, keys: Tensor) -> Tensor:
        """[J, R, N]: what these keys get of one softmax over them and the request's own."""
        logits = torch.cat([self.queries @ keys.mT, self.own_mass[..., None]], dim=-1)
        return logits.softmax(dim=-1)[..., :-1]

    def own(self, share: Tensor) -> Tensor:
        """[J, R, V]: what the request's own tokens add to the output, beside keys with these shares [J, R, N]."""
        return (1 - share.sum(dim=-1, keepdim=True)) * self.own_output

    def output(self, keys: Tensor, values: Tensor) -> Tensor:
        """[J, R, V], of that softmax."""
        share = self.shares(keys)
        return share @ values + self.own(share)


@dataclass(frozen=True)
class Kept:
    """What is kept of a text."""

    keys: Tensor  # [J, t, D]
    values: Tensor  # [J, t, V]
    lost: Tensor  # [J], of what the text adds to the outputs of attention: the share of squares that is not there


def kept(queries: Queries, keys: Tensor, values: Tensor, t: int, moves: int) -> Kept:
    """The keys of a pursuit, moved to stand for all of them, with values that give the same outputs.

    Args:
        keys: [J, N, D]; the first one, at which attention rests, is always among those that are taken.
        values: [J, N, V].
        moves: steps of gradients; 0 for none.
    """
    if t == keys.shape[1]:
        return Kept(keys, values, keys.new_zeros(len(keys)))
    held_out = torch.zeros(queries.queries.shape[1], dtype=torch.bool)
    held_out[HELD_OUT - 1 :: HELD_OUT] = True
    fitted, asked = queries.rows(~held_out), queries.rows(held_out if held_out.any() else ~held_out)
    share = fitted.shares(keys)  # [J, R, N]
    target = share.sum(dim=-1)  # [J, R]: of the text in all that a query sees
    wanted = share @ values + fitted.own(share)
    rows = by_pursuit(share, target, t)  # [J, t]
    bias = nnls(_columns(share, rows), target).log().clamp(LEAST_BIAS, MOST_BIAS)  # [J, t]
    found = _rows(keys, rows) + bias[..., None] * direction(fitted.queries, target)[:, None]
    left = found, fitted_values(fitted, wanted, found, _rows(values, rows))
    if moves:
        left = moved(fitted, wanted, *left, moves)
    return Kept(*left, lost(asked, keys, values, *left))


def direction(queries: Tensor, weight: Tensor) -> Tensor:
    """The u [J, D] with q u = 1 for all queries [J, R, D], as nearly as weighted least squares come.

    Queries of a head have much in common, so a key k + b u has the logit q k + b of a key with a bias of its own.

    Args:
        weight: [J, R], of a query.
    """
    weighted = queries * weight[..., None]
    return _solved(weighted.mT @ weighted, weighted.mT @ weight[..., None], LEAST_RIDGE)[..., 0]


def by_pursuit(share: Tensor, target: Tensor, t: int) -> Tensor:
    """Orthogonal matching pursuit: the keys whose shares, weighted, add up best to the target: [J, t] int64.

    Args:
        share: [J, R, N].
        target: [J, R].
    """
    with rounded_products():  # which tell keys apart as well
        gram = torch.stack([each.mT @ each for each in share])  # [J, N, N]; torch rounds no products of batches
    onto = (share.mT @ target[..., None])[..., 0]  # [J, N]
    rows = torch.zeros(len(gram), 1, dtype=torch.int64, device=onto.device)
    while (found := rows.shape[1]) < t:
        among = _rows(gram, rows)  # [J, found, N]
        weights = _solved(_columns(among, rows), onto.gather(1, rows)[..., None], LEAST_RIDGE).clamp(min=0)
        left = (onto - (among.mT @ weights)[..., 0]).scatter(1, rows, -torch.inf)
        rows = torch.cat([rows, left.topk(min(math.ceil(t / ROUNDS), t - found)).indices], dim=1)
    return rows.sort().values


def nnls(matrix: Tensor, target: Tensor) -> Tensor:
    """The w >= 0 [J, t] with the least |matrix w - target|, by accelerated projected gradients (FISTA).

    Args:
        matrix: [J, R, t].
        target: [J, R].
    """
    gram, onto = matrix.mT @ matrix, matrix.mT @ target[..., None]  # [J, t, t] and [J, t, 1]
    rate = 1 / torch.linalg.matrix_norm(gram).clamp(min=1e-30)[:, None, None]  # no larger than the largest eigenvalue
    w = ahead = torch.ones_like(onto)
    momentum = 1.0
    for _ in range(STEPS):
        before, w = w, (ahead - rate * (gram @ ahead - onto)).clamp(min=0)
        faster = (1 + math.sqrt(1 + 4 * momentum**2)) / 2
        ahead, momentum = w + (momentum - 1) / faster * (w - before), faster
    return w[..., 0]


def ridge(matrix: Tensor, target: Tensor, prior: Tensor) -> Tensor:
    """The y [J, t, V] with the least |matrix y - target|^2 + l |y - prior|^2; l is `RIDGE` of a column's mean square.

    Args:
        matrix: [J, R, t].
        target: [J, R, V].
        prior: [J, t, V].
    """
    return prior + _solved(matrix.mT @ matrix, matrix.mT @ (target - matrix @ prior), RIDGE)


def fitted_values(queries: Queries, wanted: Tensor, keys: Tensor, prior: Tensor) -> Tensor:
    """[J, t, V], near to a prior, for keys [J, t, D]: outputs become those that are wanted, [J, R, V]."""
    share = queries.shares(keys)
    return ridge(share, wanted - queries.own(share), prior)


def moved(queries: Queries, wanted: Tensor, keys: Tensor, values: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """Keys and values from which outputs miss less of what is wanted [J, R, V], by gradients of the squares (Adam)."""
    units = (1 / queries.queries.square().mean(dim=1).sqrt().clamp(min=1e-3))[:, None], values.square().mean().sqrt()
    found = [keys.clone(), values.clone()]
    means, squares = ([torch.zeros_like(each) for each in found] for _ in range(2))
    for step in range(1, steps + 1):
        rate = FAR * min(1, step / 5) * (1 - (step - 1) / steps)
        for at, gradient in enumerate(slopes(queries, wanted, *found)):
            scaled = gradient * units[at]
            means[at].lerp_(scaled, 0.1)
            squares[at].lerp_(scaled.square(), 0.01)
            size = (squares[at] / (1 - 0.99**step)).sqrt().clamp(min=1e-12)
            found[at] -= rate * units[at] * means[at] / (1 - 0.9**step) / size
    return found[0], fitted_values(queries, wanted, *found)


def slopes(queries: Queries, wanted: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients, by keys and by values, of half the squares of what outputs miss of what is wanted."""
    share = queries.shares(keys)
    missing = share @ values + queries.own(share) - wanted  # [J, R, V]
    of_shares = missing @ values.mT - (missing * queries.own_output).sum(dim=-1, keepdim=True)  # [J, R, t]
    of_logits = share * (of_shares - (share * of_shares).sum(dim=-1, keepdim=True))
    return of_logits.mT @ queries.queries, share.mT @ missing


def lost(queries: Queries, keys: Tensor, values: Tensor, kept_keys: Tensor, kept_values: Tensor) -> Tensor:
    """See `Kept.lost`; 0 if nothing looks at the text."""
    whole = queries.output(keys, values)
    missing = (queries.output(kept_keys, kept_values) - whole).square().sum(dim=(1, 2))
    added = (whole - queries.own_output).square().sum(dim=(1, 2))
    return torch.where(added > 0, missing / added, 0.0)


def _rows(matrix: Tensor, rows: Tensor) -> Tensor:
    """[J, N, D] at rows [J, t]: [J, t, D]."""
    return matrix.gather(1, rows[..., None].expand(-1, -1, matrix.shape[2]))


def _columns(matrix: Tensor, columns: Tensor) -> Tensor:
    """[J, R, N] at columns [J, t]: [J, R, t]."""
    return matrix.gather(2, columns[:, None].expand(-1, matrix.shape[1], -1))


def _solved(gram: Tensor, onto: Tensor, ridge: float) -> Tensor:
    """Of normal equations, [J, t, t] and [J, t, V], with a share of a column's mean square on the diagonal."""
    strength = (ridge * gram.diagonal(dim1=1, dim2=2).mean(dim=1)).clamp(min=1e-20)[:, None, None]
    solution: Tensor = torch.linalg.solve(gram + strength * torch.eye(gram.shape[1]).to(gram), onto)
    return solution
