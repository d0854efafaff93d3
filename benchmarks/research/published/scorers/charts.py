"""Charts: relaxed accuracy of ChartQA, RMS-F1 of tables [https://arxiv.org/abs/2212.10505], BLEU-4 of texts."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from .scored import Prediction, Question, Rule, Score, by_id, over_predictions, over_questions, percent

TOLERANCE = 0.05  # of a number, relative
THETA_TEXT, THETA_NUMBER = 0.5, 0.1  # of DePlot
Points = list[tuple[str, str]]  # of a table: a key and a value


def number(text: str, *, published: bool) -> float | None:
    """A number; one with "%" is a hundredth of it. Corrected: thousands' commas and signs of currency are left out."""
    text = text if published else text.strip().lstrip("$€£").replace(",", "")
    try:
        return float(text.rstrip("%")) / 100 if text.endswith("%") else float(text)
    except ValueError:
        return None


def relaxed(question: Question, text: str, *, published: bool) -> float:
    return max(_relaxed(answer, text, published=published) for answer in question.answers)


def _relaxed(target: str, text: str, *, published: bool) -> float:
    wanted, found = number(target, published=published), number(text, published=published)
    if published:
        if found is not None and wanted:
            return float(abs(found - wanted) / abs(wanted) <= TOLERANCE)
        return float(text.lower() == target.lower())
    if wanted is None or found is None:
        return float(text.strip().lower() == target.strip().lower())
    if ("%" in target) != ("%" in text):  # 50% of 50: the same figure, written with and without its unit
        found = found * 100 if "%" in text else found / 100
    return float(abs(found - wanted) <= TOLERANCE * abs(wanted))


CHART_QA = Rule(
    over_predictions(partial(relaxed, published=True)),
    over_questions(partial(relaxed, published=False)),
    (
        'pix2struct relaxed_correctness: a target of 0 needs the same string: "0.0" is wrong',
        '"50%" is 0.5, and wrong for "50"; no space, thousands separator or currency is removed',
    ),
    (
        "0 is a number",
        "% may be left out",
        "spaces, thousands' commas and $, €, £ do not matter",
        "every question counts once",
    ),
)


def anls(a: str, b: str, theta: float = THETA_TEXT) -> float:
    """1 - normalised edit distance, 0 if that is above theta; two empty texts are equal."""
    from rapidfuzz.distance import Levenshtein

    distance = Levenshtein.normalized_distance(a, b)
    return 1 - distance if distance <= theta else 0.0


def value_similarity(target: str, found: str) -> float:
    """Of two cells: 1 - relative error of numbers, 0 from a tenth on; of texts their ANLS."""
    a, b = number(target, published=True), number(found, published=True)
    if a is None or b is None or a == 0:
        return 1.0 if (a is not None and a == b) else anls(target, found)
    error = min(1.0, abs(b - a) / abs(a))
    return 1 - error if error < THETA_NUMBER else 0.0


def data_points(table: str, *, transposed: bool, published: bool) -> Points:
    """A key for each cell, its row's first cell and its column's header, and its value; the title is one of them.

    Published: a repeated key overwrites, and rows that are shorter than the header lose cells silently.
    """
    rows = [row.split(" | ") for row in table.lower().strip().split("\n")] if table.strip() else []
    points: Points = []
    if rows and rows[0][0] == "title":
        points.append(("title", " | ".join(rows.pop(0)[1:])))
    if transposed and rows:
        width = max(map(len, rows))
        rows = [list(column) for column in zip(*[row + [""] * (width - len(row)) for row in rows], strict=True)]
    header, body = (rows[0], rows[1:]) if rows else ([], [])
    for row in body:
        cells = row if published else row + [""] * (len(header) - len(row))
        points += [(f"{cells[0]} {name}", cell) for name, cell in zip(header[1:], cells[1:], strict=False)]
    return list(dict(points).items()) if published else points


def _matched(target: Points, found: Points) -> tuple[float, float, float]:
    """Precision, recall and F1 of points that are paired by their keys alone."""
    if not target and not found:
        return 1.0, 1.0, 1.0
    if not target or not found:
        return 0.0, 0.0, 0.0
    from scipy.optimize import linear_sum_assignment

    similar = [[anls(wanted, key) for wanted, _ in target] for key, _ in found]  # [found, target]
    pairs = zip(*linear_sum_assignment([[1 - value for value in row] for row in similar]), strict=True)
    total = sum(similar[row][column] * value_similarity(target[column][1], found[row][1]) for row, column in pairs)
    precision, recall = total / len(found), total / len(target)
    both = precision + recall
    return precision, recall, 2 * precision * recall / both if both else 0.0


def rms(target: str, found: str, *, published: bool) -> tuple[float, float, float]:
    """Relative mapping similarity: precision, recall, F1; the better of the prediction and its transposed table."""
    wanted = data_points(target, transposed=False, published=published)
    tries = [_matched(wanted, data_points(found, transposed=way, published=published)) for way in (False, True)]
    return max(tries, key=lambda each: each[2])


def _tables(questions: Sequence[Question], predictions: Sequence[Prediction], *, published: bool) -> Score:
    texts = by_id(predictions)
    asked = [question for question in questions if question.id in texts] if published else list(questions)
    found = {
        question.id: max(
            (rms(answer, texts.get(question.id, ""), published=published) for answer in question.answers),
            key=lambda each: each[2],
        )
        for question in asked
    }
    kept = 1 if published else 2  # recall is stored as F1
    names = ("precision", "recall", "f1")
    means = {name: percent(sum(each[at] for each in found.values()), len(found)) for at, name in enumerate(names)}
    means["f1"] = percent(sum(each[kept] for each in found.values()), len(found))
    each = tuple(found[question.id][kept] if question.id in found else None for question in questions)
    return Score(
        {"rms_f1": means["f1"], "rms_precision": means["precision"], "rms_recall": means["recall"]}, each, len(found)
    )


CHART_TO_TABLE = Rule(
    partial(_tables, published=True),
    partial(_tables, published=False),
    (
        "DePlot table_datapoints: recall is stored as F1",
        "a repeated key overwrites the cell before it; short rows lose cells silently",
        "two empty texts divide by zero in ANLS (they are equal here)",
    ),
    ("F1 is F1", "repeated keys are points of their own, short rows have empty cells", "every question counts"),
)


def _bleu(questions: Sequence[Question], predictions: Sequence[Prediction], *, published: bool) -> Score:
    from sacrebleu.metrics import BLEU

    texts = by_id(predictions)
    asked = [question for question in questions if not published or question.id in texts]
    if not asked:
        return Score({"bleu4": 0.0}, (None,) * len(questions), 0)
    most = max(len(question.answers) for question in asked)
    references = [[question.answers[min(at, len(question.answers) - 1)] for question in asked] for at in range(most)]
    corpus = BLEU().corpus_score([texts.get(question.id, "") for question in asked], references)
    sentence = BLEU(effective_order=True)
    each = tuple(
        sentence.sentence_score(texts.get(question.id, ""), list(question.answers)).score / 100
        if question in asked
        else None
        for question in questions
    )
    return Score({"bleu4": corpus.score}, each, len(asked))


CHART_TO_TEXT = Rule(
    partial(_bleu, published=True),
    partial(_bleu, published=False),
    ("the published implementation was not found: this is sacrebleu's corpus BLEU",),
    ("every question counts",),
)
