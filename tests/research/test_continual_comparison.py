"""Means and paired differences of hand-made streams."""

import math
from collections.abc import Sequence
from typing import Any

import pytest

from benchmarks.research.continual.comparison import Streams, compare, gaps, in_errors, metric, paired
from benchmarks.research.continual.report.content import differences, finding, ranking, rivals
from tests.research.finished_runs import matrix_of

TASKS = ("guild", "digit")
AP = metric("AP")


def stream(
    method: str,
    seed: int,
    final: Sequence[float],
    base: float = 0.9,
    *,
    learned: Sequence[float] | None = None,
    done: int = 2,
    **changed: Any,
) -> dict[str, Any]:
    """What `stream.collect` gives of two tasks: a[t, t] is `learned`, the last row `final`; `done` are finished."""
    rows = [[(learned or final)[0]], list(final)][:done]
    return matrix_of(method, TASKS, rows, [base] * done, seed=seed, **changed)


def seeds(method: str, finals: Sequence[Sequence[float]], base: Sequence[float] | float = 0.9, **more: Any) -> list:
    """One stream for each seed."""
    bases = [base] * len(finals) if isinstance(base, float) else base
    return [stream(method, seed, final, bases[seed], **more) for seed, final in enumerate(finals)]


UNTOUCHED = seeds("no_memory", [[0.1, 0.1]] * 3)
GATED = seeds("gated_lora_replay", [[0.6, 0.6], [0.61, 0.61], [0.62, 0.62]])
REPLAY = seeds("lora_replay", [[0.5, 0.5], [0.51, 0.51], [0.52, 0.52]])


def test_a_paired_difference_by_hand():
    found = paired({0: 0.5, 1: 0.7, 2: 0.6}, {0: 0.4, 1: 0.5, 2: 0.3})
    assert found is not None
    assert found.value == pytest.approx(0.2)
    assert found.standard_error == pytest.approx(0.1 / math.sqrt(3))
    assert in_errors(3) == pytest.approx(4.3027, abs=1e-4)  # Student's t, 0.975, two degrees of freedom
    assert found.margin == pytest.approx(4.3027 * 0.1 / math.sqrt(3), rel=1e-4)
    assert found.verdict == "open"
    only_both = paired({0: 0.5, 1: 0.7, 2: 0.9}, {2: 0.8, 3: 0.1, 0: 0.2})
    assert only_both is not None
    assert only_both.seeds == (0, 2)
    assert only_both.value == pytest.approx(0.2)
    assert paired({0: 0.5}, {1: 0.5}) is None


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([0.20, 0.21, 0.22], "more"),
        ([-0.20, -0.21, -0.22], "less"),
        ([0.20, -0.10, 0.05], "open"),
        ([0.0, 0.0, 0.0], "open"),
        ([0.1, 0.1, 0.1], "more"),  # no spread at all
        ([0.3], "unknown"),
    ],
)
def test_a_difference_counts_where_0_is_outside_its_interval(values, expected):
    found = paired(dict(enumerate(values)), dict.fromkeys(range(len(values)), 0.0))
    assert found is not None
    assert found.verdict == expected


def test_rows_of_the_comparison():
    runs = [*UNTOUCHED, *seeds("lora", [[0.2, 0.6], [0.4, 0.8]], [0.2, 0.6]), stream("lora", 2, [1.0, 1.0], done=1)]
    untouched, lora = compare(Streams(runs))
    assert untouched["metrics"]["base_retention"] == {"mean": 1.0, "standard_error": 0.0}
    assert (lora["method"], lora["seeds"], lora["all_seeds"]) == ("lora", [0, 1], False)
    assert lora["metrics"]["AP"] == {"mean": 0.5, "standard_error": 0.1}
    assert lora["metrics"]["base_retention"]["mean"] == round(0.4 / 0.9, 4)
    assert lora["tasks"]["guild"] == {"mean": 0.3, "standard_error": 0.1}
    assert lora["learn_seconds"]["mean"] == 4.0


def test_the_untouched_model_stands_in_for_every_budget_and_others_do_not():
    streams = Streams([*UNTOUCHED, *GATED, *seeds("lora", [[0.2, 0.2]] * 3, budget=64)])
    assert streams.methods(64) == ("no_memory", "lora")
    difference = streams.difference("lora", "no_memory", 64, AP)
    assert difference is not None
    assert difference.value == pytest.approx(0.1)
    assert streams.difference("lora", "gated_lora_replay", 64, AP) is None


def test_what_is_missing_is_named():
    larger = seeds("gated_lora_replay", [[0.6, 0.6]] * 2, budget=64)
    unfinished = stream("gated_lora_replay", 2, [0.6, 0.6], budget=64, done=1)
    assert gaps(Streams([*UNTOUCHED, *GATED, *larger, unfinished, REPLAY[0]])) == [
        "gated_lora_replay, budget 64, seed 2: 1 of 2 tasks done; not counted.",
        "lora_replay, budget 32, seed 1: not run.",
        "lora_replay, budget 32, seed 2: not run.",
        *(f"lora_replay, budget 64, seed {seed}: not run." for seed in range(3)),
    ]
    assert gaps(Streams([*UNTOUCHED, *GATED])) == []


def test_who_is_compared_with_whom():
    lucky = stream("lora", 0, [1.0, 1.0])  # lacks seeds
    er = seeds("er_replay", [[0.9, 0.9], [0.91, 0.91], [0.92, 0.92]])
    refined = seeds("refined", [[0.7, 0.7]] * 3)
    streams = Streams([*UNTOUCHED, *GATED, *REPLAY, lucky, *er, *refined, *seeds("refined_no_gate", [[0.6, 0.6]] * 3)])
    assert ranking(streams, 32)[:2] == ["er_replay", "refined"]
    assert rivals(streams, 32) == ("gated_lora_replay", "lora_replay", "er_replay")
    found = {(row["method"], row["against"]): row["AP"] for row in differences(streams)}
    assert found["refined", "er_replay"]["mean"] == pytest.approx(-0.21)
    assert found["refined", "er_replay"]["verdict"] == "less"
    assert found["refined_no_gate", "refined"]["mean"] == pytest.approx(-0.1)
    assert finding(streams) == "32 entries: ER + replay has the highest AP; InduceKV (refined) is 21.0 points behind."
    assert finding(Streams([stream("lora", 0, [0.1, 0.1], done=1)])).startswith("No stream is complete")
