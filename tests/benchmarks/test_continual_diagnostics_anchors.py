"""Anchor representativeness: on hand-made losses, and on memories whose losses are computed here one by one."""

from dataclasses import replace

import pytest
import torch

from benchmarks.continual.diagnostics.anchors import agreement, disjoint
from benchmarks.continual.methods import Artifact
from selector.backbone.injection import Memory
from selector.backbone.scoring import Scorer
from selector.data.anchors import AnchorStore
from selector.update.build import build_bundle
from selector.update.settings import BuildSettings
from tests.benchmarks.finished_runs import diagnose, refusal, write_configuration, write_run

TASKS = ("guild", "field", "beside")
ANCHORS = 2


def test_agreement_of_hand_made_losses():
    found = agreement([(1.0, 1.0), (2.0, 4.0), (4.0, 2.0)])
    # Deviations (-4/3, -1/3, 5/3) and (-4/3, 5/3, -1/3): their product's sum over the sum of squares is 2/3 over 14/3.
    assert found["pearson"] == pytest.approx(1 / 7)
    assert found["spearman"] == pytest.approx(0.5)  # 1 - 6 (0 + 1 + 1) / (3 * 8)
    assert found["mean_gap"] == pytest.approx(0)
    assert found["mean_absolute_gap"] == pytest.approx(4 / 3)
    assert found["relative_gap"] == pytest.approx((0 + 0.5 + 1.0) / 3)
    assert found["states"] == 3


@pytest.mark.parametrize(
    ("pairs", "correlation", "gap"),
    [
        ([(1.5, 1.0), (2.5, 2.0), (5.5, 5.0), (9.5, 9.0)], pytest.approx(1), 0.5),  # shifted
        ([(2.0, 1.0), (3.0, 2.0)], None, 1.0),  # too few
        ([(4.0, 1.0), (4.0, 2.0), (4.0, 3.0)], None, 2.0),  # constant
    ],
)
def test_a_shift_keeps_the_correlation_and_too_few_or_constant_losses_have_none(pairs, correlation, gap):
    found = agreement(pairs)
    assert (found["pearson"], found["spearman"]) == (correlation, correlation)
    assert found["mean_gap"] == found["mean_absolute_gap"] == pytest.approx(gap)


@pytest.fixture(scope="module")
def data(demo_suite):
    return demo_suite(4, 1, 3, *TASKS)


def test_held_out_examples_are_no_anchors_under_any_id(data):
    task = data[1].tasks[0]
    anchors = [replace(example, id=f"anchor/{example.id}") for example in task.train[1:3]]
    assert disjoint(task.train, anchors, 9, seed=0) == [task.train[0], task.train[3]]
    assert len(disjoint(task.train, anchors, 1, seed=0)) == 1
    draws = [tuple(example.id for example in disjoint(task.train, [], 3, seed=seed)) for seed in (*range(9), 0)]
    assert {len(set(draw)) for draw in draws} == {3}
    assert draws[0] == draws[-1]
    assert len(set(draws)) > 1


@pytest.fixture(scope="module")
def memories(demo_backbone, data):
    """Of each task's memory, from two examples of every task seen by then."""
    examples = [example for task in data[1].tasks for example in task.train[:2]]
    return [build_bundle(demo_backbone, examples[:number], BuildSettings(budget=6)) for number in (2, 4, 6)]


@pytest.fixture
def out(data, memories, tmp_path):
    """A run whose anchors are the first two training examples of each task."""
    write_configuration(tmp_path, *data)
    state = write_run(tmp_path, "stored", TASKS, bundles=memories) / "02-beside" / "state"
    store = AnchorStore(state / "anchors")
    for task in data[1].tasks:
        store.append(task.train[:ANCHORS], run=task.name, policy="random", seed=0)
    Artifact("bundle", "memory.safetensors", 1000, {}).write(state)
    return tmp_path


@torch.no_grad()
def loss(backbone, bundle, examples) -> float:
    """Mean NLL, every example by itself."""
    scorer, memory, losses = Scorer(backbone), Memory.from_bundle(bundle), []
    for example in examples:
        terms = memory.terms(backbone.retrieval_keys(scorer.prefix(example)))
        losses.append(float(scorer.losses([example], memory, terms)))
    return sum(losses) / len(losses)


def test_each_memory_is_asked_anchors_and_held_out_examples_of_earlier_tasks(out, data, demo_backbone, memories):
    found = diagnose("anchors", out, "--method", "stored", "--held-out", "train")
    assert [(state["after"], list(state["by_task"])) for state in found["states"]] == [
        ("field", ["guild"]),
        ("beside", ["guild", "field"]),
    ]
    for state, bundle in zip(found["states"], memories[1:], strict=True):
        for task in data[1].tasks:
            if task.name in state["by_task"]:
                expected = [loss(demo_backbone, bundle, part) for part in (task.train[:2], task.train[2:])]
                assert state["by_task"][task.name] == pytest.approx(expected, rel=1e-4)
    pairs = [pair for state in found["states"] for pair in state["by_task"].values()]
    assert found["by_memory_and_task"] == pytest.approx(agreement(pairs), rel=1e-3)
    later = found["states"][1]["by_task"]
    means = [found["states"][0]["by_task"]["guild"], [(a + b) / 2 for a, b in zip(*later.values(), strict=True)]]
    assert found["by_memory"]["states"] == 2
    assert found["by_memory"]["mean_absolute_gap"] == pytest.approx(sum(abs(a - h) for a, h in means) / 2, rel=1e-4)


def test_anchors_of_earlier_tasks_are_stored_beside_the_memory(out):
    store = AnchorStore(out / "stored/budget-32/seed-0/02-beside/state/anchors")
    earlier = sum(task.bytes for task in store.tasks()[:2])
    on_disk = [path for number in (0, 1) for path in (store.folder / f"{number:04d}").rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in on_disk) == earlier
    found = diagnose("anchors", out, "--method", "stored", "--questions", 1)
    assert found["storage"] == {
        "anchors": 4,
        "anchor_bytes": earlier,
        "memory_bytes": 1000,
        "ratio": pytest.approx(earlier / 1000, rel=1e-5),
    }


def test_memories_that_were_not_kept_are_counted_and_a_method_without_anchors_is_refused(out, capsys):
    states = out / "stored/budget-32/seed-0"
    (states / "01-field/state").rename(states / "gone")
    found = diagnose("anchors", out, "--method", "stored")
    assert ([state["after"] for state in found["states"]], found["memories_gone"]) == (["beside"], 1)
    (states / "02-beside/state/anchors").rename(states / "moved")
    assert "stored keeps no anchors of guild" in refusal(capsys, "anchors", out, "--method", "stored")


def test_a_stream_of_one_task_is_refused(data, memories, tmp_path, capsys):
    write_configuration(tmp_path, data[0], data[1].ordered(TASKS[:1]))
    write_run(tmp_path, "stored", TASKS[:1], bundles=memories[:1])
    assert "no memory of a task that another came before" in refusal(capsys, "anchors", tmp_path, "--method", "stored")
