"""Closed forms against float64: scipy's least squares, a pursuit that tries every key, and attention written out."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.optimize import lsq_linear
from scipy.special import logsumexp
from torch import Tensor

from selector.document.matching import RIDGE, Queries, by_pursuit, fitted_values, kept, lost, moved, nnls, ridge, slopes

J, R, N, D, V = 2, 60, 24, 8, 6
MOVES = 40


@pytest.fixture
def queries() -> Queries:
    made = torch.manual_seed(0)
    return Queries(*(torch.randn(*size, generator=made) for size in ((J, R, D), (J, R), (J, R, V))))


@pytest.fixture
def text() -> tuple[Tensor, Tensor]:
    made = torch.manual_seed(1)
    return torch.randn(J, N, D, generator=made), torch.randn(J, N, V, generator=made)


def attended(queries: Queries, keys: Tensor, values: Tensor) -> np.ndarray:
    """One softmax over these keys and the request's own, in float64."""
    logits = (queries.queries.double() @ keys.double().mT).numpy()
    mass, own = logsumexp(logits, axis=-1), queries.own_mass.double().numpy()
    total = np.logaddexp(mass, own)
    share = np.exp(logits - total[..., None])
    return share @ values.double().numpy() + np.exp(own - total)[..., None] * queries.own_output.double().numpy()


def test_weights_are_those_of_scipy() -> None:
    made = torch.manual_seed(2)
    matrix, target = torch.randn(J, R, 7, generator=made), torch.randn(J, R, generator=made)
    pairs = zip(matrix.double().numpy(), target.double().numpy(), strict=True)
    expected = np.stack([lsq_linear(*pair, bounds=(0, np.inf), tol=1e-12).x for pair in pairs])
    assert (expected < 1e-6).any()
    assert (expected > 1e-2).any()
    np.testing.assert_allclose(nnls(matrix, target).numpy(), expected, atol=1e-4)


@pytest.mark.parametrize("t", [5, 80])  # fewer than the rows, and more
def test_values_are_those_of_one_least_squares_problem(t: int) -> None:
    made = torch.manual_seed(3)
    matrix, target, prior = (torch.randn(J, *size, generator=made) for size in ((R, t), (R, V), (t, V)))
    found = ridge(matrix, target, prior)
    for head in range(J):
        strength = RIDGE * float(matrix[head].double().square().sum()) / t
        rows = np.vstack([matrix[head].double().numpy(), strength**0.5 * np.eye(t)])
        right = np.vstack([target[head].double().numpy(), strength**0.5 * prior[head].double().numpy()])
        np.testing.assert_allclose(found[head].numpy(), np.linalg.lstsq(rows, right)[0], atol=2e-3)


def test_the_pursuit_takes_the_key_that_helps_most(queries: Queries, text: tuple[Tensor, Tensor]) -> None:
    """A plain one in float64, which fits all weights again before each key."""
    share = (queries.queries @ text[0].mT).softmax(dim=-1) * torch.rand(J, R, 1)
    found = by_pursuit(share, share.sum(dim=-1), 6)
    for head in range(J):
        matrix, target, taken = share[head].double().numpy(), share[head].double().sum(dim=1).numpy(), [0]
        while len(taken) < 6:
            weights = np.linalg.lstsq(matrix[:, taken], target)[0].clip(0)
            onto = matrix.T @ (target - matrix[:, taken] @ weights)
            onto[taken] = -np.inf
            taken.append(int(onto.argmax()))
        assert found[head].tolist() == sorted(taken)


def test_moves_go_down_the_slope_that_torch_finds(queries: Queries, text: tuple[Tensor, Tensor]) -> None:
    keys, values = text[0][:, :5].clone(), text[1][:, :5].clone()
    wanted = queries.output(*text)
    pair = [each.clone().requires_grad_() for each in (keys, values)]
    logits = torch.cat([queries.queries @ pair[0].mT, queries.own_mass[..., None]], dim=-1)
    share = logits.softmax(dim=-1)
    output = share[..., :-1] @ pair[1] + share[..., -1:] * queries.own_output
    (output - wanted).square().sum().div(2).backward()
    for ours, theirs in zip(slopes(queries, wanted, keys, values), pair, strict=True):
        torch.testing.assert_close(ours, theirs.grad, rtol=1e-4, atol=1e-4)
    start = keys, fitted_values(queries, wanted, keys, values)
    before, after = (
        float((queries.output(*each) - wanted).square().sum())
        for each in (start, moved(queries, wanted, *start, MOVES))
    )
    assert after < 0.9 * before


def test_all_keys_lose_nothing(queries: Queries, text: tuple[Tensor, Tensor]) -> None:
    found = kept(queries, *text, N, MOVES)
    assert (found.lost < 1e-6).all()
    np.testing.assert_allclose(attended(queries, found.keys, found.values), attended(queries, *text), atol=1e-4)


def test_what_is_lost_is_counted_on_queries_that_were_not_fitted(queries: Queries, text: tuple[Tensor, Tensor]) -> None:
    """Fewer keys lose more; fitted values lose less than the keys' own, on the queries that they are fitted to."""
    few, more = kept(queries, *text, 4, MOVES), kept(queries, *text, 16, MOVES)
    assert (more.lost > 0).all()
    assert (more.lost < few.lost).all()
    held_out = torch.arange(R) % 5 == 4
    whole, found = attended(queries, *text)[:, held_out], attended(queries, few.keys, few.values)[:, held_out]
    added = whole - queries.own_output.double().numpy()[:, held_out]
    expected = ((found - whole) ** 2).sum(axis=(1, 2)) / (added**2).sum(axis=(1, 2))
    np.testing.assert_allclose(few.lost.numpy(), expected, rtol=1e-4)
    fitted = queries.rows(~held_out)
    own = few.values.roll(1, dims=1)
    assert (lost(fitted, *text, few.keys, few.values) < lost(fitted, *text, few.keys, own)).all()


def test_a_text_that_nothing_looks_at_loses_nothing(queries: Queries, text: tuple[Tensor, Tensor]) -> None:
    blind = Queries(queries.queries, torch.full((J, R), 200.0), queries.own_output)
    found = kept(blind, *text, 3, MOVES)
    assert (found.lost == 0).all()
    assert found.values.isfinite().all()
