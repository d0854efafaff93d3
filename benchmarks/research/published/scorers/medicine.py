"""Open and closed questions of medicine, as LLaVA-Med evaluates them; a question's row has `answer_type`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

from inducekv_vllm.errors import TaskDataError

from .scored import Prediction, Question, Rule, Score, by_id, percent
from .vqa_text import vqa_normalised

OPEN, CLOSED = "OPEN", "CLOSED"
Metrics = dict[str, float]


def _open_published(gold: list[str], found: list[str]) -> Metrics:
    right = sum(word in gold for word in found)
    missed = sum(word not in found for word in gold)
    distinct = len(set(gold) & set(found))
    return {
        "open_recall": right / (right + missed) if right + missed else 0.0,
        "open_exact": distinct / len(found) if found else 0.0,
    }


def _open_corrected(gold: list[str], found: list[str]) -> Metrics:
    shared = (Counter(gold) & Counter(found)).total()
    return {"open_recall": shared / len(gold) if gold else 0.0, "open_exact": float(gold == found)}


def closed_published(gold: str, found: str) -> float | None:
    """None: neither right nor wrong, it is left out."""
    if "yes" not in found and "no" not in found:
        return 0.0
    return 1.0 if gold in found else None


def closed_corrected(gold: str, found: str) -> float:
    """Right if the gold answer's words stand in the prediction, and of yes and no the right one alone."""
    words = found.split()
    if gold in ("yes", "no"):
        said = [word for word in words if word in ("yes", "no")]
        return float(bool(said) and set(said) == {gold})
    wanted = gold.split()
    return float(any(words[at : at + len(wanted)] == wanted for at in range(len(words) - len(wanted) + 1)))


def _score(
    questions: Sequence[Question],
    predictions: Sequence[Prediction],
    *,
    published: bool,
    of_open: Callable[[list[str], list[str]], Metrics],
    of_closed: Callable[[str, str], float | None],
) -> Score:
    if published and [question.id for question in questions] != [prediction.id for prediction in predictions]:
        raise TaskDataError("LLaVA-Med's evaluator asserts that predictions have the questions' ids, in their order")
    texts, each, opened, closed = by_id(predictions), [], [], []
    for question in questions:
        gold, found = (
            vqa_normalised(text, published=published) for text in (question.answers[0], texts.get(question.id, ""))
        )
        kind = question.row.get("answer_type")
        if kind == OPEN:
            opened.append(of_open(gold.split(), found.split()))
            each.append(opened[-1]["open_recall"])
        elif kind == CLOSED:
            closed.append(of_closed(gold, found))
            each.append(closed[-1])
        else:
            raise TaskDataError(f"question {question.id!r}: expected answer_type OPEN or CLOSED, found {kind!r}")
    counted = [value for value in closed if value is not None]
    metrics = {"closed_accuracy": percent(sum(counted), len(counted))}
    for name in ("open_recall", "open_exact"):
        metrics[name] = percent(sum(of[name] for of in opened), len(opened))
    return Score(metrics, tuple(each), len(counted) + len(opened))


MEDICINE = Rule(
    partial(_score, published=True, of_open=_open_published, of_closed=closed_published),
    partial(_score, published=False, of_open=_open_corrected, of_closed=closed_corrected),
    (
        "LLaVA-Med run_eval: a wrong yes or no is left out, so that only answers that say neither lower the score",
        '"no" is looked for inside words: "normal" is right for "no"',
        "a closed answer that is neither yes nor no is wrong unless the prediction says yes or no, too",
        "recall counts each repetition: 'left left left' has 3/4 of 'left lung'",
        "'exact match' is the number of distinct gold words found, divided by the prediction's words",
        "the printed numbers of open and closed questions are exchanged (not printed here)",
    ),
    (
        "a wrong yes or no is wrong, whole words are compared, other closed answers are looked for as words",
        "recall counts a gold word once; exact match is equality",
        "a question without a prediction scores 0",
    ),
)
