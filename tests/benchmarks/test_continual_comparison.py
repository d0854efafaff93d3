"""Means and paired differences of hand-made streams, and what is said of them in words."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from benchmarks.continual.comparison import Streams, compare, final_accuracy, gaps, in_errors, metric, paired
from benchmarks.continual.methods import METHODS
from benchmarks.continual.metrics import accuracy_matrix, summary
from benchmarks.continual.report import names
from benchmarks.continual.report.figures import mean_matrix
from benchmarks.continual.report.sentences import ranking, shortfalls, verdict, winner
from benchmarks.continual.report.tables import ablation_table, main_table, rival_table
from inducekv_vllm.errors import ConfigError

TASKS = ("guild", "digit")
AP = metric("AP")


def stream(
    method: str,
    seed: int,
    final: Sequence[float],
    base: float = 0.9,
    *,
    budget: int = 32,
    learned: Sequence[float] | None = None,
    done: int | None = None,
    stored: int = 1000,
    settings: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """What `stream.collect` gives of two tasks: a[t, t] is `learned`, the last row `final`; `done` are finished."""
    learned = learned or final
    rows = [[learned[0]], list(final)][:done]
    bases = [base] * len(rows)
    return {
        "suite": "tiny",
        "method": method,
        "settings": settings or {"name": method},
        "budget": budget,
        "seed": seed,
        "order": list(TASKS),
        "complete": len(rows) == len(TASKS),
        "accuracy": rows,
        "base": bases,
        "stored_bytes": [stored] * len(rows),
        "anchor_bytes": [0] * len(rows),
        "seconds": [{"learn": 2.0, "evaluate": 3.0}] * len(rows),
        "metrics": summary(accuracy_matrix(rows), bases),
        "reports": [{}] * len(rows),
    }


def seeds(method: str, finals: Sequence[Sequence[float]], base: Sequence[float] | float = 0.9, **more: Any) -> list:
    """One stream for each seed."""
    bases = [base] * len(finals) if isinstance(base, float) else base
    return [stream(method, seed, final, bases[seed], **more) for seed, final in enumerate(finals)]


UNTOUCHED = seeds("no_memory", [[0.1, 0.1]] * 3, stored=0)
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


def test_only_seeds_of_both_are_compared():
    found = paired({0: 0.5, 1: 0.7, 2: 0.9}, {2: 0.8, 3: 0.1, 0: 0.2})
    assert found is not None
    assert found.seeds == (0, 2)
    assert found.value == pytest.approx(0.2)
    assert paired({0: 0.5}, {1: 0.5}) is None


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
    assert verdict(Streams(runs)).text
    assert main_table(Streams(runs), 32)


def test_the_untouched_model_stands_in_for_every_budget_and_others_do_not():
    runs = [*UNTOUCHED, *GATED, *seeds("lora", [[0.2, 0.2]] * 3, budget=64)]
    streams = Streams(runs)
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
    runs = [
        *UNTOUCHED,
        *GATED,
        *seeds("gated_lora_replay", [[0.6, 0.6]] * 2, budget=64),
        stream("gated_lora_replay", 2, [0.6, 0.6], budget=64, done=1),
        *REPLAY[:1],
    ]
    assert gaps(Streams(runs)) == [
        "gated_lora_replay, budget 64, seed 2: 1 of 2 tasks done; not counted.",
        "lora_replay, budget 32: not run with seed 1, 2.",
        "lora_replay: not run with budget 64.",
    ]
    assert gaps(Streams([*UNTOUCHED, *GATED])) == []


# --------------------------------------------------------------------------------------------------- sentences


def test_a_winner_beyond_the_error():
    refined = seeds("refined", [[0.8, 0.8], [0.81, 0.81], [0.81, 0.81]])
    streams = Streams([*UNTOUCHED, *GATED, *REPLAY, *refined])
    found = verdict(streams)
    assert found.kind == "better"
    lost, won, reading = found.text.splitlines()
    assert lost == (
        "Where InduceKV falls short, first. With 32 entries, InduceKV (refined) falls behind no memory, gated LoRA + "
        "replay and LoRA + replay on no task."
    )
    assert won == (
        "Who won. With 32 entries, InduceKV (refined) answers most of all tasks' questions after the last task: AP "
        "80.7 ± 0.3%, base questions 90.0 ± 0.0%, the best of 4 methods. The next, gated LoRA + replay, has AP 61.0 ± "
        "0.6% (base 90.0 ± 0.0%): 19.7 ± 0.3 points less, beyond the error."
    )
    assert "over 3 seeds" in reading
    assert "4.3 of them" in reading


def test_a_tie_within_the_error_is_no_win():
    refined = seeds("refined", [[0.6, 0.6], [0.65, 0.65], [0.61, 0.61]])
    streams = Streams([*UNTOUCHED, *GATED, *REPLAY, *refined])
    assert verdict(streams).kind == "open"
    assert shortfalls(streams, 32) == [
        "With 32 entries, InduceKV (refined) is not ahead of gated LoRA + replay (AP +1.0 ± 1.5, no difference beyond "
        "the error)."
    ]
    assert (
        "gated LoRA + replay, has AP 61.0 ± 0.6% (base 90.0 ± 0.0%): no difference beyond the error (+1.0 ± 1.5)"
        in (winner(streams, 32))
    )


def test_where_inducekv_loses_the_tasks_are_named_worst_first():
    refined = seeds("refined", [[0.5, 0.3], [0.5, 0.3], [0.51, 0.32]], base=[0.85, 0.85, 0.84])
    paper = seeds("paper", [[0.1, 0.1], [0.11, 0.09], [0.09, 0.11]])
    streams = Streams([*UNTOUCHED, *GATED, *REPLAY, *paper, *refined])
    assert verdict(streams).kind == "worse"
    first, second = shortfalls(streams, 32)
    assert first.startswith(
        "With 32 entries, InduceKV (paper) gains nothing over no memory (AP 0.0 ± 0.0, no difference"
    )
    assert first.endswith("; loses to LoRA + replay (AP −41.0 ± 0.6).")  # no tasks: it gains nothing on any
    assert second == (
        "With 32 entries, InduceKV (refined) costs base accuracy (−5.3 ± 0.3); loses to gated LoRA + replay (AP −20.5 "
        "± 0.3) on digit (−30.3 ± 0.3) and guild (−10.7 ± 0.3); loses to LoRA + replay (AP −10.5 ± 0.3) on digit "
        "(−20.3 ± 0.3)."
    )
    assert "The better recipe of InduceKV, InduceKV (refined), has AP 40.5 ± 0.5%" in winner(streams, 32)


def test_behind_on_a_task_though_ahead_in_all():
    refined = seeds("refined", [[0.9, 0.5], [0.91, 0.5], [0.92, 0.51]])
    (told,) = shortfalls(Streams([*UNTOUCHED, *GATED, *REPLAY, *refined]), 32)
    assert told == (
        "With 32 entries, InduceKV (refined) is behind gated LoRA + replay on digit (−10.7 ± 0.3), though ahead in all "
        "(AP +9.7 ± 0.2)."
    )


def test_a_task_without_gain_is_named_though_others_gain():
    refined = seeds("refined", [[0.9, 0.1], [0.91, 0.12], [0.92, 0.1]])
    (told,) = shortfalls(Streams([*UNTOUCHED, *refined]), 32)
    assert told.startswith(
        "With 32 entries, InduceKV (refined) gains nothing beyond the error over no memory on digit (+0.7 ± 0.7), "
        "though ahead in all (AP +40.8 ± 0.4); "
    )


def test_a_single_seed_is_told_as_one():
    streams = Streams([UNTOUCHED[0], GATED[0], REPLAY[0], stream("refined", 0, [0.55, 0.55])])
    (told,) = shortfalls(streams, 32)
    assert "loses to gated LoRA + replay (AP −5.0, of a single seed, error unknown)" in told
    assert "5.0 points less of a single seed, error unknown." in winner(streams, 32)
    assert "one seed only, so no error is known" in verdict(streams).text
    assert verdict(streams).kind == "open"


def test_a_rival_that_is_missing_is_named_and_the_best_other_is_compared():
    lora = seeds("er_replay", [[0.9, 0.9], [0.91, 0.91], [0.92, 0.92]])
    (told,) = shortfalls(Streams([*UNTOUCHED, *REPLAY, *lora, *seeds("refined", [[0.7, 0.7]] * 3)]), 32)
    assert "cannot be held against gated LoRA + replay, as no seed is complete in both" in told
    assert "loses to ER + replay (AP −21.0 ± 0.6)" in told
    (told,) = shortfalls(Streams([*GATED, *seeds("refined", [[0.7, 0.7]] * 3)]), 32)
    assert "cannot be held against no memory, which was not run" in told


def test_who_lacks_a_seed_is_not_ranked():
    lucky = stream("lora", 0, [1.0, 1.0])
    streams = Streams([*UNTOUCHED, *GATED, *REPLAY, lucky])
    assert ranking(streams, 32) == ["gated_lora_replay", "lora_replay", "no_memory"]
    assert "best of 3 methods" in winner(streams, 32)


def test_nothing_complete_and_no_recipe():
    assert verdict(Streams([stream("lora", 0, [0.1, 0.1], done=1)])).text == (
        "No stream is complete, so nothing can be said yet."
    )
    assert verdict(Streams([*UNTOUCHED, *GATED])).text.startswith("No recipe of InduceKV was run.\nWho won.")
    half = Streams([*GATED, stream("refined", 0, [0.1, 0.1], done=1)])
    assert shortfalls(half, 32) == ["With 32 entries, no stream of InduceKV (refined) is complete."]


# --------------------------------------------------------------------------------------------------- tables


def cells(table: str | None) -> list[list[str]]:
    assert table is not None
    rows = table.partition("<tbody>")[2].split("<tr")[1:]
    return [[cell.partition(">")[2].partition("</td>")[0] for cell in row.split("<td")[1:]] for row in rows]


def test_the_main_table_marks_the_best_of_those_with_all_seeds():
    lucky = stream("lora", 0, [1.0, 1.0], base=1.0)
    table = main_table(Streams([*UNTOUCHED, *GATED, *REPLAY, lucky]), 32)
    rows = cells(table)
    assert [row[0] for row in rows] == ["gated LoRA + replay", "LoRA + replay", "no memory", "LoRA"]
    assert rows[0][1:4] == ["3", "61.0 ± 0.6", "0.0 ± 0.0"]
    assert rows[3][1:3] == ["1, without 1, 2", "100.0"]
    marked = [part.partition("</td>")[0] for part in table.split('<td class="marked">')[1:]]
    assert marked.count("61.0 ± 0.6") == 3  # AP, Last and MAA over time
    assert "100.0" not in marked
    assert not any(part.startswith("10.0") for part in marked)  # the untouched model forgets nothing, and is not best


def test_ablations_stand_beside_their_recipe():
    full = seeds("refined", [[0.8, 0.8], [0.82, 0.82], [0.84, 0.84]], learned=[0.9, 0.9])
    gate = seeds("refined_no_gate", [[0.7, 0.7], [0.72, 0.72], [0.75, 0.75]], base=0.3, learned=[0.9, 0.9])
    rows = cells(ablation_table(Streams([*full, *gate]), 32, "refined"))
    assert rows[0][:3] == ["InduceKV (refined), full", "3", "82.0 ± 1.2"]
    assert rows[1][0] == "no relevance gate"
    assert rows[1][3] == "−9.7 ± 0.3 ▼"
    assert rows[1][5] == "+9.7 ± 0.3 ▲"  # forgets as much more
    assert rows[1][7] == "−60.0 ± 0.0 ▼"
    assert ablation_table(Streams(full), 32, "refined") is None


def test_an_ablation_of_two_parts_is_held_against_the_ablation_of_one():
    full, gate = seeds("refined", [[0.8, 0.8]] * 2), seeds("refined_no_gate", [[0.7, 0.7]] * 2)
    sqrt = seeds("refined_sqrt", [[0.4, 0.4]] * 2)
    rows = cells(ablation_table(Streams([*full, *sqrt, *gate]), 32, "refined"))
    assert [row[0] for row in rows[1:]] == [
        "no relevance gate",
        "sqrt weighting, no relevance gate (against: InduceKV (refined), no relevance gate)",
    ]
    assert rows[2][3] == "−30.0 ± 0.0 ▼"
    alone = cells(ablation_table(Streams([*full, *sqrt]), 32, "refined"))
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
    table = rival_table(Streams([*UNTOUCHED, *GATED, *refined]), 32)
    assert cells(table)[1] == [
        "InduceKV (refined) − gated LoRA + replay",
        "+9.7 ± 0.2",
        "+30.0 ± 0.0",
        "−10.7 ± 0.3",
        "0.0 ± 0.0",
    ]
    assert table is not None
    assert table.count('class="marked"') == 1


def test_the_mean_matrix_leaves_what_is_not_learned_open():
    runs = [stream("lora", 0, [0.2, 0.4], learned=[0.6, 0.4]), stream("lora", 1, [0.4, 0.6], learned=[0.8, 0.6])]
    found = mean_matrix(Streams(runs), "lora", 32)
    assert np.allclose(found, [[0.7, np.nan], [0.3, 0.5]], equal_nan=True)
    assert final_accuracy("digit")(runs[1]) == 0.6
