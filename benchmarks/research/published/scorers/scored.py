"""What scorers take and give, and the two ways in which they count."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from inducekv_vllm.errors import TaskDataError

Mode = Literal["published", "corrected"]
MODES: tuple[Mode, ...] = ("published", "corrected")


@dataclass(frozen=True)
class Question:
    """One test question."""

    id: str
    prompt: str
    answers: tuple[str, ...]  # the right ones, or all references
    row: Mapping[str, Any] = field(default_factory=dict)  # what else its scorer reads


@dataclass(frozen=True)
class Prediction:
    id: str
    text: str


@dataclass(frozen=True)
class Score:
    """What a scorer found.

    `metrics` are in percent unless the scorer says otherwise; `questions` has the score of each question in their
    order, None for one that does not count; `counted` is the denominator of the first metric.
    """

    metrics: Mapping[str, float]
    questions: tuple[float | None, ...]
    counted: int


Scorer = Callable[[Sequence[Question], Sequence[Prediction]], Score]
Judge = Callable[[Question, str], float]  # the score of one answer, 0 to 1


@dataclass(frozen=True)
class Rule:
    """A scorer as published, and as corrected."""

    published: Scorer
    corrected: Scorer
    slips: tuple[str, ...]  # what the published one does that nobody would expect, with its file
    differences: tuple[str, ...]  # what the corrected one does instead

    def score(self, mode: Mode, questions: Sequence[Question], predictions: Sequence[Prediction]) -> Score:
        return (self.published if mode == "published" else self.corrected)(questions, predictions)


def over_predictions(judge: Judge, name: str = "accuracy") -> Scorer:
    """Every line of the predictions counts: questions without one vanish, repeated ones count twice.

    Raises TaskDataError: a prediction is of no question; the published scripts end with a KeyError.
    """

    def score(questions: Sequence[Question], predictions: Sequence[Prediction]) -> Score:
        known = {question.id: question for question in questions}
        values: dict[str, list[float]] = {}
        for prediction in predictions:
            if prediction.id not in known:
                raise TaskDataError(f"no question has the id {prediction.id!r}")
            values.setdefault(prediction.id, []).append(judge(known[prediction.id], prediction.text))
        total = sum(sum(each) for each in values.values())
        each = tuple(values[question.id][-1] if question.id in values else None for question in questions)
        return Score({name: percent(total, len(predictions))}, each, len(predictions))

    return score


def over_answered(judge: Judge, name: str = "accuracy") -> Scorer:
    """Every question with a prediction counts once; the denominator shrinks by the others."""

    def score(questions: Sequence[Question], predictions: Sequence[Prediction]) -> Score:
        texts = by_id(predictions)
        each = tuple(judge(question, texts[question.id]) if question.id in texts else None for question in questions)
        found = [value for value in each if value is not None]
        return Score({name: percent(sum(found), len(found))}, each, len(found))

    return score


def over_questions(judge: Judge, name: str = "accuracy") -> Scorer:
    """Every question counts once; one without a prediction scores 0."""

    def score(questions: Sequence[Question], predictions: Sequence[Prediction]) -> Score:
        texts = by_id(predictions)
        each = tuple(judge(question, texts[question.id]) if question.id in texts else 0.0 for question in questions)
        return Score({name: percent(sum(each), len(questions))}, each, len(questions))

    return score


def by_id(predictions: Sequence[Prediction]) -> dict[str, str]:
    """The text of each id; the last one counts, as in the published scripts that make a dictionary."""
    return {prediction.id: prediction.text for prediction in predictions}


def percent(total: float, count: int) -> float:
    """0 for none, where the published scripts divide by zero."""
    return 100 * total / count if count else 0.0
