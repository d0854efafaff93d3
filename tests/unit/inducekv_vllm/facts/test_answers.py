"""The mixture of the model's and the stored distribution, against float64."""

from __future__ import annotations

import math

import pytest
import torch
from inducekv_vllm.facts.answers import mixed_rows

from inducekv_vllm.facts import Answers, answers_of, mixed, next_tokens


def test_stored_answers_that_agree_go_on() -> None:
    answers = Answers(0.9, (0.5, 0.3, 0.2), ((1, 2, 9), (1, 3, 9), (4, 9)))
    assert next_tokens(answers, []) == pytest.approx({1: 0.8, 4: 0.2})
    assert next_tokens(answers, [1]) == pytest.approx({2: 0.625, 3: 0.375})
    assert next_tokens(answers, [1, 2]) == {9: 1.0}
    assert next_tokens(answers, [1, 2, 9]) == {}
    assert next_tokens(answers, [5]) == {}


def test_the_mixture() -> None:
    logits = torch.randn(50, generator=torch.Generator().manual_seed(0))
    p = 0.1 * logits.double().softmax(0)
    p[7] += 0.9 * 0.75
    p[8] += 0.9 * 0.25
    torch.testing.assert_close(mixed(logits, 0.9, {7: 0.75, 8: 0.25}).double(), p.log(), rtol=0, atol=1e-6)
    assert mixed(logits, 0.9, {}) is logits  # to the bit


def test_what_is_ruled_out_stays_so() -> None:
    logits = torch.randn(50, generator=torch.Generator().manual_seed(0))
    logits[[3, 7]] = -math.inf
    p = (1 - 0.9 * 0.25) * logits.double().softmax(0)
    p[8] += 0.9 * 0.25
    torch.testing.assert_close(mixed(logits, 0.9, {7: 0.75, 8: 0.25}).double(), p.log(), rtol=0, atol=1e-6)
    only_the_model = mixed(logits, 0.9, {7: 1.0})
    torch.testing.assert_close(only_the_model, logits.log_softmax(0), rtol=0, atol=1e-6)


def test_rows_are_mixed_one_by_one() -> None:
    logits = torch.randn(3, 20, generator=torch.Generator().manual_seed(1))
    stored = torch.zeros(3, 20)
    stored[0, 4], stored[1, 5], stored[1, 6] = 1.0, 0.5, 0.5
    rows = mixed_rows(logits, torch.tensor([0.9, 0.6, 0.0]), stored)
    torch.testing.assert_close(rows[0], mixed(logits[0], 0.9, {4: 1.0}))
    torch.testing.assert_close(rows[1], mixed(logits[1], 0.6, {5: 0.5, 6: 0.5}))
    torch.testing.assert_close(rows[2], logits[2].log_softmax(0))


def test_the_closest_answers_share_the_weight() -> None:
    assert answers_of([0.8, 0.7], [[1], [2]], 0.9) is None
    found = answers_of([0.99, 0.95, 0.91, 0.8], [[1], [2], [3], [4]], 0.9)
    assert found is not None
    assert found.token_ids == ((1,), (2,), (3,))
    assert sum(found.shares) == pytest.approx(1)
    assert list(found.shares) == sorted(found.shares, reverse=True)
