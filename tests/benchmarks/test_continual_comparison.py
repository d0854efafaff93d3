"""Means and paired differences of hand-made streams, and the report's paragraph and tables of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from benchmarks.continual.comparison import Streams, compare, final_accuracy, gaps, in_errors, metric, paired
from benchmarks.continual.methods import METHODS
from benchmarks.continual.report import names
from benchmarks.continual.report.figures import mean_matrix
from benchmarks.continual.report.ranking import leaders, ranking, shortfalls, summary, verdict
from benchmarks.continual.report.tables import ablation_table, base_table, main_table, rival_table, task_table
from inducekv_vllm.errors import ConfigError
from selector.report.parts import Table
from tests.benchmarks.finished_runs import matrix_of

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


# --------------------------------------------------------------------------------------------------- differences


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


def test_where_the_untouched_model_answers_no_base_question_nothing_can_be_retained():
    runs = [stream("no_memory", 0, [0.1, 0.1], base=0.0), stream("lora", 0, [0.2, 0.2], base=0.0)]
    assert all("base_retention" not in row["metrics"] for row in compare(Streams(runs)))
    assert summary(Streams(runs))
    assert main_table(Streams(runs), 32)


def test_the_untouched_model_stands_in_for_every_budget_and_others_do_not():
    streams = Streams([*UNTOUCHED, *GATED, *seeds("lora", [[0.2, 0.2]] * 3, budget=64)])
    assert streams.methods(64) == ("no_memory", "lora")
    difference = streams.difference("lora", "no_memory", 64, AP)
    assert difference is not None
    assert difference.value == pytest.approx(0.1)
    assert streams.difference("lora", "gated_lora_replay", 64, AP) is None


def test_streams_that_do_not_belong_together_are_refused():
    with pytest.raises(ConfigError, match=r"lora, budget 32 was run with different settings: .*5.* seed 0, .*6"):
        Streams([stream("lora", seed, [0, 0], settings={"steps": 5 + seed}) for seed in (0, 1)])
    with pytest.raises(ConfigError, match="lora, budget 32, seed 1 has another order of tasks"):
        Streams([stream("lora", 0, [0, 0]), {**stream("lora", 1, [0, 0]), "order": ["digit", "guild"]}])
    with pytest.raises(ConfigError, match="lora, budget 32, seed 0 occurs twice"):
        Streams([stream("lora", 0, [0, 0]), stream("lora", 0, [0, 0])])


def test_what_is_missing_is_named():
    larger = seeds("gated_lora_replay", [[0.6, 0.6]] * 2, budget=64)
    unfinished = stream("gated_lora_replay", 2, [0.6, 0.6], budget=64, done=1)
    assert gaps(Streams([*UNTOUCHED, *GATED, *larger, unfinished, REPLAY[0]])) == [
        "gated_lora_replay, budget 64, seed 2: 1 of 2 tasks done; not counted.",
        "lora_replay, budget 32: not run with seed 1, 2.",
        "lora_replay: not run with budget 64.",
    ]
    assert gaps(Streams([*UNTOUCHED, *GATED])) == []


# --------------------------------------------------------------------------------------------------- the paragraph


def test_a_winner_beyond_the_error():
    refined = seeds("refined", [[0.8, 0.8], [0.81, 0.81], [0.81, 0.81]])
    streams = Streams([*UNTOUCHED, *GATED, *REPLAY, *refined])
    assert verdict(streams) == "better"
    assert summary(streams) == (
        "InduceKV (refined) falls behind nobody. Highest AP: InduceKV (refined) (32 entries: 80.7 ± 0.3%). Next: gated "
        "LoRA + replay (32 entries: −19.7 ± 0.3). Points are of AP ± standard error over 3 seeds, paired; a difference "
        "counts beyond 4.3 errors."
    )


def test_a_tie_within_the_error_is_no_win():
    refined = seeds("refined", [[0.6, 0.6], [0.65, 0.65], [0.61, 0.61]])
    streams = Streams([*UNTOUCHED, *GATED, *REPLAY, *refined])
    assert verdict(streams) == "open"
    assert shortfalls(streams, [32], "refined") == "ties with gated LoRA + replay (32 entries: +1.0 ± 1.5)"
    assert leaders(streams, [32]) == (
        "Highest AP: InduceKV (refined) (32 entries: 62.0 ± 1.5%). "
        "Next: gated LoRA + replay (32 entries: −1.0 ± 1.5 within the error)."
    )


def test_where_inducekv_gains_nothing_or_loses():
    refined = seeds("refined", [[0.5, 0.3], [0.5, 0.3], [0.51, 0.32]], base=[0.85, 0.85, 0.84])
    paper = seeds("paper", [[0.1, 0.1], [0.11, 0.09], [0.09, 0.11]])
    worse = seeds("paper", [[0.0, 0.1]] * 3, budget=64)
    streams = Streams([*UNTOUCHED, *GATED, *REPLAY, *paper, *worse, *refined])
    assert verdict(streams) == "worse"
    assert shortfalls(streams, [32], "paper") == "gains nothing over no memory (32 entries: 0.0 ± 0.0)"
    assert shortfalls(streams, [64], "paper") == "loses to no memory (64 entries: −5.0 ± 0.0)"
    assert shortfalls(streams, [32, 64], "refined") == (
        "loses base accuracy (32 entries: −5.3 ± 0.3), loses to gated LoRA + replay (32 entries: −20.5 ± 0.3), "
        "loses to LoRA + replay (32 entries: −10.5 ± 0.3), has no complete stream (64 entries)"
    )
    # Tasks without gain are named though others gain.
    refined = seeds("refined", [[0.9, 0.1], [0.91, 0.12], [0.92, 0.1]])
    assert "gains nothing on digit (32 entries)" in shortfalls(Streams([*UNTOUCHED, *refined]), [32], "refined")


def test_budgets_stand_together_and_of_many_the_ends():
    runs = list(UNTOUCHED)
    for budget in (16, 32, 64):
        runs += seeds("lora_replay", [[0.5, 0.5]] * 2, budget=budget)
        runs += seeds("refined", [[0.4, 0.4 + budget / 1000]] * 2, budget=budget)
    text = summary(Streams(runs))
    assert "loses to LoRA + replay (16 entries: −9.2 ± 0.0; 64: −6.8 ± 0.0)" in text
    assert "32" not in text


def test_a_single_seed_has_no_error():
    streams = Streams([UNTOUCHED[0], GATED[0], REPLAY[0], stream("refined", 0, [0.55, 0.55])])
    assert "loses to gated LoRA + replay (32 entries: −5.0)" in shortfalls(streams, [32], "refined")
    assert summary(streams).endswith("there is one seed only, so the error is unknown.")
    assert verdict(streams) == "open"


def test_a_missing_rival_is_named_and_the_best_other_is_compared():
    er = seeds("er_replay", [[0.9, 0.9], [0.91, 0.91], [0.92, 0.92]])
    refined = seeds("refined", [[0.7, 0.7]] * 3)
    text = shortfalls(Streams([*UNTOUCHED, *REPLAY, *er, *refined]), [32], "refined")
    assert "cannot be compared with gated LoRA + replay (32 entries)" in text
    assert "loses to ER + replay (32 entries: −21.0 ± 0.6)" in text
    text = shortfalls(Streams([*GATED, *refined]), [32], "refined")
    assert "cannot be compared with no memory (32 entries)" in text


def test_a_method_without_all_seeds_is_not_ranked():
    lucky = stream("lora", 0, [1.0, 1.0])
    streams = Streams([*UNTOUCHED, *GATED, *REPLAY, lucky])
    assert ranking(streams, 32) == ["gated_lora_replay", "lora_replay", "no_memory"]
    assert leaders(streams, [32]).startswith("Highest AP: gated LoRA + replay (32 entries: 61.0 ± 0.6%).")


def test_nothing_complete_and_no_recipe():
    unfinished = Streams([stream("lora", 0, [0.1, 0.1], done=1)])
    assert (verdict(unfinished), summary(unfinished)) == ("open", "No stream is complete, so there is no result yet.")
    assert summary(Streams([*UNTOUCHED, *GATED])).startswith("No recipe of InduceKV was run. Highest AP:")
    half = Streams([*GATED, stream("refined", 0, [0.1, 0.1], done=1)])
    assert shortfalls(half, [32], "refined") == "has no complete stream (32 entries)"


# --------------------------------------------------------------------------------------------------- tables


def rows_of(table: Table | None) -> list[list[Any]]:
    assert table is not None
    return [list(row) for row in table.rows]


def test_the_main_table_marks_the_best_of_those_with_all_seeds():
    lucky = stream("lora", 0, [1.0, 1.0], base=1.0)
    table = main_table(Streams([*UNTOUCHED, *GATED, *REPLAY, lucky]), 32)
    rows = rows_of(table)
    assert [row[0] for row in rows] == ["gated LoRA + replay", "LoRA + replay", "no memory", "LoRA"]
    assert rows[0][1:3] == ["61.0 ± 0.6", "0.0 ± 0.0"]
    assert rows[0][-1] == "3"
    assert (rows[3][1], rows[3][-1]) == ("100.0", "1, without 1, 2")
    marked = [rows[row][column] for row, column in sorted(table.marked)]
    assert marked.count("61.0 ± 0.6") == 3  # AP, Last and MAA over time
    assert "100.0" not in marked
    assert not any(part.startswith("10.0") for part in marked)  # the untouched model forgets nothing, and is not best


def test_ablations_stand_beside_their_recipe():
    full = seeds("refined", [[0.8, 0.8], [0.82, 0.82], [0.84, 0.84]], learned=[0.9, 0.9])
    gate = seeds("refined_no_gate", [[0.7, 0.7], [0.72, 0.72], [0.75, 0.75]], base=0.3, learned=[0.9, 0.9])
    rows = rows_of(ablation_table(Streams([*full, *gate]), 32, "refined"))
    assert rows[0][:3] == ["InduceKV (refined), full", "3", "82.0 ± 1.2"]
    assert rows[1][0] == "no relevance gate"
    assert rows[1][3] == "−9.7 ± 0.3 ▼"
    assert rows[1][5] == "+9.7 ± 0.3 ▲"  # forgets as much more
    assert rows[1][7] == "−60.0 ± 0.0 ▼"
    assert ablation_table(Streams(full), 32, "refined") is None


def test_an_ablation_of_two_parts_is_held_against_the_ablation_of_one():
    full, gate = seeds("refined", [[0.8, 0.8]] * 2), seeds("refined_no_gate", [[0.7, 0.7]] * 2)
    sqrt = seeds("refined_sqrt", [[0.4, 0.4]] * 2)
    rows = rows_of(ablation_table(Streams([*full, *sqrt, *gate]), 32, "refined"))
    assert [row[0] for row in rows[1:]] == [
        "no relevance gate",
        "sqrt weighting, no relevance gate (against: InduceKV (refined), no relevance gate)",
    ]
    assert rows[2][3] == "−30.0 ± 0.0 ▼"
    alone = rows_of(ablation_table(Streams([*full, *sqrt]), 32, "refined"))
    assert alone[1][3] == "no seed in common"


def test_every_method_of_the_benchmark_has_a_name_and_a_place():
    known = [*names.METHODS, *names.ABLATIONS]
    assert [name for name in METHODS if name not in known] == []
    assert [one.against for one in names.ABLATIONS.values() if one.against not in known] == []
    assert names.place("paper_uniform") < names.place("paper_of_a_new_kind") < names.place("refined")
    assert names.title("paper_of_a_new_kind") == "InduceKV (paper), of a new kind"
    assert names.ablation_of("lora_replay") is None


def test_losses_to_rivals_are_marked_by_task():
    refined = seeds("refined", [[0.9, 0.5], [0.91, 0.5], [0.92, 0.51]])
    table = rival_table(Streams([*UNTOUCHED, *GATED, *refined]))
    assert table.head == ["difference (points)", "entries", "all tasks (AP)", "guild", "digit", "base"]
    title, *differences = rows_of(table)[1]
    assert title == "InduceKV (refined) − gated LoRA + replay"
    assert differences == [32, "+9.7 ± 0.2", "+30.0 ± 0.0", "−10.7 ± 0.3", "0.0 ± 0.0"]
    assert table.marked == {(1, 4)}


def test_accuracies_are_shaded_and_the_best_of_each_task_is_marked():
    refined = seeds("refined", [[0.9, 0.5], [0.91, 0.5], [0.92, 0.51]])
    streams = Streams([*UNTOUCHED, *GATED, *refined])
    table = task_table(streams, 32)
    assert [row[0] for row in table.rows] == ["InduceKV (refined)", "gated LoRA + replay", "no memory"]
    assert table.rows[0][1:] == ["91.0 ± 0.6", "50.3 ± 0.3", "90.0 ± 0.0"]
    assert table.marked == {(0, 1), (1, 2), (0, 3), (1, 3)}
    assert (table.shares[0, 1], table.shares[2, 1]) == (0.91, 0.1)
    assert base_table(streams, 32).rows[0] == ["InduceKV (refined)", "90.0 ± 0.0", "90.0 ± 0.0"]


def test_the_mean_matrix_leaves_what_is_not_learned_open():
    runs = [stream("lora", 0, [0.2, 0.4], learned=[0.6, 0.4]), stream("lora", 1, [0.4, 0.6], learned=[0.8, 0.6])]
    found = mean_matrix(Streams(runs), "lora", 32)
    assert np.allclose(found, [[0.7, np.nan], [0.3, 0.5]], equal_nan=True)
    assert final_accuracy("digit")(runs[1]) == 0.6
