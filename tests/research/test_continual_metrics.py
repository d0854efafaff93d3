"""Every score on a matrix small enough to compute by hand."""

import math

import numpy as np
import pytest

from benchmarks.research.continual import metrics

# Task 0 is learned to 0.8, falls to 0.5 and recovers to 0.6; task 1 to 0.9, falls to 0.7; task 2 to 0.4.
ROWS = [[0.8], [0.5, 0.9], [0.6, 0.7, 0.4]]
A = metrics.accuracy_matrix(ROWS)
FINAL = (0.6 + 0.7 + 0.4) / 3


def test_the_matrix_hides_tasks_not_yet_seen():
    assert A.shape == (3, 3)
    assert np.isnan(A[np.triu_indices(3, 1)]).all()
    assert not np.isnan(A[np.tril_indices(3)]).any()
    full = metrics.accuracy_matrix([[0.8, 0.1], [0.5, 0.9]])  # rows that also measure what was not yet learned
    assert np.isnan(full[0, 1])
    with pytest.raises(ValueError, match="row 1 of an accuracy matrix of 3 tasks has 1 entries"):
        metrics.accuracy_matrix([[0.8], [0.5], [0.6, 0.7, 0.4]])


@pytest.mark.parametrize(
    ("score", "expected"),
    [
        (metrics.average, FINAL),
        (metrics.last, 0.4),
        (metrics.mean_average_accuracy_over_time, (0.8 + (0.5 + 0.9) / 2 + FINAL) / 3),
        (metrics.backward_transfer, ((0.6 - 0.8) + (0.7 - 0.9)) / 2),
        (metrics.average_forgetting, ((0.8 - 0.6) + (0.9 - 0.7)) / 2),
        (metrics.forgetting_rate, (0.3 + 0.0 + 0.2) / 3),  # the recovery of task 0 counts as 0
    ],
)
def test_scores_of_the_example(score, expected):
    assert score(A) == pytest.approx(expected)


def test_backward_transfer_and_forgetting_differ_where_a_task_improves_later():
    a = metrics.accuracy_matrix([[0.2], [0.9, 0.5], [0.6, 0.5, 1.0]])
    assert metrics.backward_transfer(a) == pytest.approx((0.4 + 0.0) / 2)  # from just after learning
    assert metrics.average_forgetting(a) == pytest.approx((0.3 + 0.0) / 2)  # from the best ever


def test_a_stream_of_one_task_forgets_nothing():
    a = metrics.accuracy_matrix([[0.7]])
    assert metrics.average(a) == metrics.last(a) == 0.7
    assert metrics.backward_transfer(a) == metrics.average_forgetting(a) == metrics.forgetting_rate(a) == 0.0


def test_base_retention():
    assert metrics.base_retention([0.9, 0.6, 0.72], untouched=0.96) == pytest.approx(0.75)
    with pytest.raises(ValueError, match="positive"):
        metrics.base_retention([0.5], untouched=0.0)


def test_standard_error_of_the_mean():
    assert metrics.standard_error([1.0, 2.0, 3.0]) == pytest.approx(1 / math.sqrt(3))
    assert math.isnan(metrics.standard_error([1.0]))


def test_the_summary_agrees_with_its_parts():
    scores = metrics.summary(A, [0.9, 0.5, 0.7])
    assert {scores[name] for name in ("Avg", "MAA", "AP", "AvgAcc")} == {metrics.average(A)}
    assert scores["AF"] == metrics.average_forgetting(A)
    assert (scores["base_final"], scores["base_lowest"]) == (0.7, 0.5)
