"""ImageNet and GQA of CoIN."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import zip_longest

from inducekv_vllm.errors import TaskDataError

from .exact import plain
from .scored import Prediction, Question, Rule, Score, Scorer, over_answered, over_questions, percent


def _by_line(questions: Sequence[Question], predictions: Sequence[Prediction], *, cased: bool) -> Score:
    if len(predictions) > len(questions):
        raise TaskDataError(f"{len(predictions)} predictions for {len(questions)} questions")
    each: list[float | None] = []
    for question, prediction in zip_longest(questions, predictions):
        if prediction is None:
            each.append(None)
            continue
        gold, text = question.answers[0], prediction.text
        if not cased:
            gold, text = gold.lower(), text.lower()
        each.append(float(gold in text or text in gold))
    return Score({"accuracy": percent(sum(filter(None, each)), len(predictions))}, tuple(each), len(predictions))


def _imagenet(questions: Sequence[Question], predictions: Sequence[Prediction]) -> Score:
    return _by_line(questions, predictions, cased=True)


def _imagenet_without_case(questions: Sequence[Question], predictions: Sequence[Prediction]) -> Score:
    return _by_line(questions, predictions, cased=False)


def names_class(question: Question, text: str) -> float:
    """Whether the text has the class's name, or one of its names between commas, as whole words."""
    names = [question.answers[0], *question.answers[0].split(",")]
    return float(
        any(re.search(rf"(?<!\w){re.escape(plain(name))}(?!\w)", text.casefold()) for name in names if plain(name))
    )


_BY_NAME = (
    "right if the gold name, or a synonym between commas, stands in the prediction as whole words, in any case",
    "paired by id; every question counts once",
)
IMAGENET = Rule(
    _imagenet,
    over_questions(names_class),
    (
        "CoIN, HiDe-LLaVA, SEFE eval_imagenet: right if the prediction is a part of the gold name, too: "
        'an empty one always, "cat" and "a" for "tabby cat"',
        "paired by line number: what is reordered is scored against another picture",
        "upper and lower case differ",
    ),
    _BY_NAME,
)
SMOLORA_IMAGENET = Rule(_imagenet_without_case, IMAGENET.corrected, IMAGENET.slips[:2], _BY_NAME)


def _gqa(question: Question, text: str) -> float:
    return float(text.rstrip(".").lower() == question.answers[0])


def _gqa_corrected(question: Question, text: str) -> float:
    return float(plain(text) == plain(question.answers[0]))


def _balanced(scorer: Scorer) -> Scorer:
    """Of the balanced questions alone; the others do not count."""

    def score(questions: Sequence[Question], predictions: Sequence[Prediction]) -> Score:
        kept = [question for question in questions if question.row.get("balanced", True)]
        found = scorer(kept, predictions)
        values = dict(zip((question.id for question in kept), found.questions, strict=True))
        return Score(found.metrics, tuple(values.get(question.id) for question in questions), found.counted)

    return score


GQA = Rule(
    _balanced(over_answered(_gqa)),
    _balanced(over_questions(_gqa_corrected)),
    (
        "CoIN eval_gqa: the prediction is in lower case and without final periods, the gold answer as it is",
        "with missing predictions the denominator shrinks",
        "HiDe-LLaVA and MCITlib append to the result file of an earlier run (no file is written here)",
    ),
    ("gold answers are normalised likewise", "every balanced question counts"),
)
