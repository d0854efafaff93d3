"""Gates of two classifiers, on made-up texts whose means tell what their words do not, and the other way round."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from inducekv_vllm.bundle import Gate
from inducekv_vllm.gate import RANGE, TurnMarks
from selector.gate.classified import LooksAt, _share_of_misses, classified_gate, threshold
from selector.gate.classifiers import Seen, left_out_odds, odds_of, train_classifiers
from selector.gate.fitting_set import FOLDS, GateQuestion

S, F, EACH = 2, 6, 60
TASKS = ("a", "b")
LOOKS_AT = LooksAt((0, 3), TurnMarks((), None), torch.tensor([3]))
WORDS = ("apple", "bread"), ("chair", "door"), ("river", "song", "stone", "lamp", "cloud", "paper")


@dataclass(frozen=True)
class Asked:
    """n questions without clauses."""

    means: Sequence[Tensor]  # [S, F] each
    texts: Sequence[str]

    @property
    def seen(self) -> Seen:
        return Seen.of([mean[None] for mean in self.means], self.texts)


def made(seed: int = 0, each: int = EACH) -> tuple[Asked, list[GateQuestion], Tensor]:
    """Questions of two tasks and of none: words and means of their own, with some of none's mixed in."""
    generator = torch.Generator().manual_seed(seed)
    texts, means, questions, labels = [], [], [], []
    for label, own in enumerate(WORDS):
        for number in range(each * (3 if label == 2 else 1)):
            picks = torch.randint(len(WORDS[2]), (4,), generator=generator).tolist()
            texts.append(" ".join([own[number % len(own)], *(WORDS[2][pick] for pick in picks)]))
            mean = torch.randn(S, F, generator=generator) + 1.0
            mean[:, label] += 4.0 if label < 2 else 0.0
            means.append(mean)
            task, kind = (TASKS[label], "plain") if label < 2 else (None, "everyday")
            part = "held_out" if number % FOLDS == FOLDS - 1 else "fit"
            questions.append(GateQuestion([], (), task, kind, part, fold=number % FOLDS))
            labels.append(label)
    return Asked(means, texts), questions, torch.tensor(labels)


def evidence(gate: Gate, asked: Asked) -> Tensor:
    """[n, H]"""
    means, words = gate.mean_scores, gate.word_scores
    assert means is not None
    assert words is not None
    rows = [
        torch.cat([means.evidence(mean[None]), torch.from_numpy(words.evidence(text))])
        for mean, text in zip(asked.means, asked.texts, strict=True)
    ]
    return torch.stack(rows)


def margins(gate: Gate, asked: Asked) -> Tensor:
    """[n, C]"""
    rule = gate.rule
    return torch.stack([torch.from_numpy(rule.decide(found).margins) for found in evidence(gate, asked).numpy()])


@pytest.fixture(scope="module")
def fitted() -> tuple[Any, ...]:
    asked, questions, labels = made()
    return classified_gate(asked.seen, questions, labels, TASKS, LOOKS_AT, 0.05)


@pytest.fixture(scope="module")
def gate(fitted: tuple[Any, ...]) -> Gate:
    return fitted[0].stored()


def test_new_questions_are_routed_and_others_stay_out(gate: Gate) -> None:
    asked, _, labels = made(seed=1)
    found = [gate.rule.decide(each) for each in evidence(gate, asked).numpy()]
    own = [decision.task == TASKS[label] for decision, label in zip(found, labels.tolist(), strict=True) if label < 2]
    others = [decision.task is not None for decision, label in zip(found, labels.tolist(), strict=True) if label == 2]
    assert sum(own) / len(own) >= 0.9
    assert sum(others) / len(others) <= 0.05
    assert {decision.closed for decision in found if decision.task is None} == {"outside", "below_threshold"}


def test_margins_are_the_mean_of_both_log_odds_less_the_threshold(fitted: tuple[Any, ...]) -> None:
    asked, questions, labels = made()
    seen, gate = asked.seen, fitted[0]
    counts = torch.where(labels < 2, 64 / EACH, 1.0)
    odds = odds_of(train_classifiers(seen, labels, counts, 2), seen).clamp(-RANGE, RANGE)  # [n, 2, C]
    left_out = left_out_odds(seen, labels, counts, torch.tensor([q.fold for q in questions]), 2)
    chosen = threshold(0.4 * left_out[:, 0] + 0.6 * left_out[:, 1], labels.where(labels < 2, -1), 0.05)
    expected = 0.4 * odds[:, 0] + 0.6 * odds[:, 1] - chosen
    torch.testing.assert_close(
        margins(gate, asked), expected.double(), rtol=0, atol=0.02
    )  # words are stored in float16


def test_a_fold_is_not_seen_by_those_who_judge_it() -> None:
    asked, _, labels = made()
    seen = asked.seen
    folds, counts = torch.arange(len(labels)) % FOLDS, torch.ones(len(labels))
    found = left_out_odds(seen, labels, counts, folds, 2)
    other = labels.clone()
    other[folds == 2] = 2 - other[folds == 2]  # what the left-out ones are said to be changes the others' alone
    again = left_out_odds(seen, other, counts, folds, 2)
    assert torch.equal(found[folds == 2], again[folds == 2])
    assert not torch.equal(found[folds != 2], again[folds != 2])


@pytest.mark.parametrize("misses", [0.0, 0.05, 0.2])
def test_a_share_of_new_questions_is_missed(misses: float) -> None:
    """Over many draws of questions to set a threshold on, and new ones."""
    generator = torch.Generator().manual_seed(0)
    missed = []
    for _ in range(3000):
        drawn = torch.randn(60, 1, generator=generator)
        reached = threshold(drawn[:59], torch.zeros(59, dtype=torch.int64), misses)
        missed.append(float(drawn[59, 0] < reached))
    assert sum(missed) / len(missed) == pytest.approx(max(misses, 1 / 60), abs=0.015)


def test_what_is_wrong_is_said(fitted: tuple[Any, ...]) -> None:
    asked, questions, labels = made()
    assert fitted[2] == ()
    drawn = torch.randint(2, (2 * EACH,), generator=torch.Generator().manual_seed(0))
    mixed_up = torch.cat([drawn, labels[2 * EACH :]])  # nothing tells one task from the other
    tasks = [TASKS[label] if label < 2 else None for label in mixed_up.tolist()]
    questions = [replace(question, task=task) for question, task in zip(questions, tasks, strict=True)]
    problems = classified_gate(asked.seen, questions, mixed_up, TASKS, LOOKS_AT, 0.05)[2]
    assert any("the tasks 'a' and 'b' are too near" in problem for problem in problems)


def test_a_gate_of_fewer_tasks_goes_on_with_its_classifiers(gate: Gate) -> None:
    asked = made(seed=5)[0]
    alone = gate.take({"b"})
    torch.testing.assert_close(margins(alone, asked)[:, 0], margins(gate, asked)[:, 1], rtol=0, atol=1e-5)


def test_what_is_asked_behind_a_greeting_is_seen(gate: Gate) -> None:
    """And a question of a task that has something of none in it is one of that task."""
    asked, _, labels = made(seed=6)
    other = asked.means[-1]
    own = [row for row, label in enumerate(labels.tolist()) if label < 2][::7]
    greeted = Asked(
        [torch.stack([(asked.means[row] + other) / 2, other, asked.means[row]]) for row in own],
        [f"Lamp and stone. {asked.texts[row]}" for row in own],
    )
    means, words = gate.mean_scores, gate.word_scores
    assert means is not None
    assert words is not None
    opened = []
    for row, mean, text in zip(own, greeted.means, greeted.texts, strict=True):
        label, of_words = labels[row], torch.from_numpy(words.evidence(text))
        found = [gate.rule.decide(torch.cat([means.evidence(each), of_words]).numpy()) for each in (mean, mean[:1])]
        assert found[0].margins[label] > found[1].margins[label]
        opened.append([decision.task == TASKS[label] for decision in found])
    with_runs, without = map(sum, zip(*opened, strict=True))
    assert with_runs > 0.8 * len(own) > without


def test_parts_of_what_belongs_to_none_are_taught_and_parts_of_a_task_are_not() -> None:
    asked, _, labels = made()
    counts = torch.ones(len(labels))
    part = torch.full((1, S, F), 9.0)

    def offered(label: int) -> Tensor:
        """Directions, with a run that one question has besides."""
        row = labels.tolist().index(label)
        means = [mean[None] for mean in asked.means]
        means[row] = torch.cat([means[row], part])
        return train_classifiers(Seen.of(means, asked.texts), labels, counts, 2).directions

    without = train_classifiers(asked.seen, labels, counts, 2).directions
    torch.testing.assert_close(offered(0), without, rtol=1e-3, atol=1e-3)
    assert not torch.allclose(offered(2), without, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(("opened", "expected"), [(0, 0.05), (2, 0.05), (3, 0.1), (30, 0.2)])
def test_more_questions_are_missed_to_keep_everyday_requests_out(opened: int, expected: float) -> None:
    """Of 100 questions the 5th lowest is the first threshold tried, and the 20th the last."""
    own = torch.arange(100.0)[:, None] / 100 - 0.5  # of one task
    threshold_5, threshold_20 = sorted(own.flatten().tolist())[4], sorted(own.flatten().tolist())[19]
    everyday = torch.full((100, 1), -3.0)
    everyday[:opened] = (threshold_5 + 0.005) if opened < 10 else threshold_20 + 1
    odds = torch.cat([own, everyday])
    labels = torch.tensor([0] * 100 + [1] * 100)
    kinds = ["plain"] * 100 + ["everyday"] * 100
    assert _share_of_misses(odds, labels, kinds, None) == expected
    assert _share_of_misses(odds, labels, kinds, 0.3) == 0.3
