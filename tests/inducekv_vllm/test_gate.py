"""The gate's rule, against a loop over its definition."""

from __future__ import annotations

import numpy as np
import pytest

from inducekv_vllm.errors import ConfigError
from inducekv_vllm.gate import RelevanceGate

TASKS = ("colours", "counts", "shapes")


def test_the_rule_is_its_definition() -> None:
    rng = np.random.default_rng(0)
    decided = set()
    for _ in range(300):
        keys = rng.standard_normal((3, 2, 5)).astype(np.float16)
        thresholds = rng.standard_normal(3).astype(np.float32) + 1
        query = rng.standard_normal((2, 5)).astype(np.float32)
        margins = []
        for key, threshold in zip(keys.astype(float), thresholds.astype(float), strict=True):
            prefix = sum(float(a) * b for a, b in zip(query[0], key[0], strict=True))
            text = sum(float(a) * b for a, b in zip(query[1], key[1], strict=True))
            margins.append(prefix + text - threshold)
        gate_decision = RelevanceGate(keys, thresholds, TASKS).decide(query)
        np.testing.assert_allclose(gate_decision.margins, margins, rtol=0, atol=1e-12)
        assert gate_decision.task == (TASKS[margins.index(max(margins))] if max(margins) >= 0 else None)
        decided.add(gate_decision.task)
    assert decided == {*TASKS, None}


def test_a_margin_of_exactly_0_is_open_and_the_first_of_equal_tasks_wins() -> None:
    keys = np.zeros((3, 2, 4))
    keys[1:, 1, 0] = 1
    query = np.eye(4)[[1, 0]]
    assert RelevanceGate(keys, [1, 1, 1], TASKS).decide(query).task == "counts"
    assert RelevanceGate(keys, [1, np.nextafter(1, 2), np.nextafter(1, 2)], TASKS).decide(query).task is None


@pytest.mark.parametrize(
    ("keys", "thresholds", "tasks", "message"),
    [
        (np.zeros((3, 5)), np.zeros(3), TASKS, "gate"),
        (np.zeros((3, 1, 5)), np.zeros(3), TASKS, "gate"),
        (np.zeros((2, 2, 5)), np.zeros(3), TASKS, "gate"),
        (np.zeros((3, 2, 5)), np.zeros(2), TASKS, "gate"),
        (np.full((3, 2, 5), np.nan), np.zeros(3), TASKS, "gate"),
        (np.zeros((3, 2, 5)), np.array([0, np.inf, 0]), TASKS, "gate"),
        (np.zeros((0, 2, 5)), np.zeros(0), (), "at least one task"),
    ],
)
def test_gates_that_cannot_be_used(
    keys: np.ndarray, thresholds: np.ndarray, tasks: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        RelevanceGate(keys, thresholds, tasks)


@pytest.mark.parametrize("query", [np.zeros(5), np.zeros((2, 4)), np.zeros((1, 5)), np.full((2, 5), np.nan)])
def test_queries_that_cannot_be_used(query: np.ndarray) -> None:
    with pytest.raises(ConfigError, match=r"query key must be finite, of shape \[2, 5\]"):
        RelevanceGate(np.zeros((3, 2, 5)), np.zeros(3), TASKS).decide(query)
