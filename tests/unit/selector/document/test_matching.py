"""Closed forms against float64: scipy's least squares, a pursuit that tries every key, and attention written out."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.optimize import lsq_linear
from scipy.special import logsumexp
from torch import Tensor

from selector.document.matching import RIDGE, Queries, by_attention, by_pursuit, kept, lost, nnls, ridge

R, N, D, V = 60, 24, 8, 6


@pytest.fixture
def queries() -> Queries:
    made = torch.manual_seed(0)
    return Queries(*(torch.randn(*size, generator=made) for size in ((R, D), (R,), (R, V))))


@pytest.fixture
def text() -> tuple[Tensor, Tensor]:
    made = torch.manual_seed(1)
    return torch.randn(N, D, generator=made), torch.randn(N, V, generator=made)


def attended(queries: Queries, keys: Tensor, values: Tensor) -> np.ndarray:
    """One softmax over these keys and the request's own, in float64."""
    logits = queries.queries.double().numpy() @ keys.double().numpy().T
    mass, own = logsumexp(logits, axis=1), queries.own_mass.double().numpy()
    total = np.logaddexp(mass, own)
    share = np.exp(logits - total[:, None])
    return share @ values.double().numpy() + np.exp(own - total)[:, None] * queries.own_output.double().numpy()


def test_weights_are_those_of_scipy() -> None:
    made = torch.manual_seed(2)
    matrix, target = torch.randn(R, 7, generator=made), torch.randn(R, generator=made)
    expected = lsq_linear(matrix.double().numpy(), target.double().numpy(), bounds=(0, np.inf), tol=1e-12).x
    assert (expected < 1e-6).any()
    assert (expected > 1e-2).any()
    np.testing.assert_allclose(nnls(matrix, target).numpy(), expected, atol=1e-4)


@pytest.mark.parametrize("t", [5, 80])  # fewer than the rows, and more
def test_values_are_those_of_one_least_squares_problem(t: int) -> None:
    made = torch.manual_seed(3)
    matrix, target, prior = (torch.randn(*size, generator=made) for size in ((R, t), (R, V), (t, V)))
    strength = RIDGE * float(matrix.double().square().sum()) / t
    rows = np.vstack([matrix.double().numpy(), strength**0.5 * np.eye(t)])
    expected = np.linalg.lstsq(rows, np.vstack([target.double().numpy(), strength**0.5 * prior.double().numpy()]))[0]
    np.testing.assert_allclose(ridge(matrix, target, prior).numpy(), expected, atol=2e-3)


def test_the_pursuit_takes_the_key_that_helps_most(queries: Queries, text: tuple[Tensor, Tensor]) -> None:
    """A plain one in float64, which fits all weights again before each key."""
    share = (queries.queries @ text[0].T).softmax(dim=1)
    matrix, target, taken = share.double().numpy(), share.double().sum(dim=1).numpy(), [0]
    while len(taken) < 6:
        weights = np.linalg.lstsq(matrix[:, taken], target)[0].clip(0)
        onto = matrix.T @ (target - matrix[:, taken] @ weights)
        onto[taken] = -np.inf
        taken.append(int(onto.argmax()))
    assert by_pursuit(share, share.sum(dim=1), 6).tolist() == sorted(taken)


def test_the_first_key_and_those_looked_at_most() -> None:
    share = torch.tensor([[0.0, 0.5, 0.1, 0.4], [0.0, 0.1, 0.2, 0.7]])
    assert by_attention(share, 2).tolist() == [0, 3]
    assert by_attention(share, 3).tolist() == [0, 1, 3]


def test_all_keys_lose_nothing(queries: Queries, text: tuple[Tensor, Tensor]) -> None:
    found = kept(queries, *text, N)
    assert found.rows.tolist() == list(range(N))
    assert found.lost < 1e-6
    np.testing.assert_allclose(attended(queries, found.keys, found.values), attended(queries, *text), atol=1e-4)


def test_what_is_lost_is_counted_on_queries_that_were_not_fitted(queries: Queries, text: tuple[Tensor, Tensor]) -> None:
    """Fewer keys lose more; fitted values lose less than the keys' own, on the queries that they are fitted to."""
    few, more = kept(queries, *text, 4), kept(queries, *text, 16)
    assert 0 < more.lost < few.lost
    held_out = torch.arange(R) % 5 == 4
    whole, found = attended(queries, *text)[held_out], attended(queries, few.keys, few.values)[held_out]
    added = whole - queries.own_output.double().numpy()[held_out]
    assert few.lost == pytest.approx(((found - whole) ** 2).sum() / (added**2).sum(), rel=1e-4)
    fitted = queries.rows(~held_out)
    own = type(few)(few.rows, few.keys, text[1][few.rows], 0.0)
    assert lost(fitted, *text, few) < lost(fitted, *text, own)


def test_a_text_that_nothing_looks_at_loses_nothing(queries: Queries, text: tuple[Tensor, Tensor]) -> None:
    blind = Queries(queries.queries, torch.full((R,), 200.0), queries.own_output)
    found = kept(blind, *text, 3)
    assert found.lost == 0
    assert found.values.isfinite().all()
