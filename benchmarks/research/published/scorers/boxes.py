"""Boxes: CoIN's grounding and Adapt-infinity's RefCOCO.

Boxes are [x1, y1, x2, y2]. CoIN's gold boxes are fractions of the square that a picture is padded to; a question's row
has the picture's `size`, [width, height] in pixels.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import partial

from inducekv_vllm.errors import TaskDataError

from .scored import Prediction, Question, Rule, Score, by_id, over_predictions, over_questions, percent

Box = tuple[float, float, float, float]
RIGHT = 0.5  # IoU must be above it
_NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)"
_FOUR = re.compile(rf"({_NUMBER})\s*,\s*({_NUMBER})\s*,\s*({_NUMBER})\s*,\s*({_NUMBER})")


def iou(a: Box, b: Box, pixel: float = 0.0) -> float:
    """Intersection over union; 0 if the union is not positive, as for a box whose corners are exchanged."""
    width = min(a[2], b[2]) - max(a[0], b[0]) + pixel
    height = min(a[3], b[3]) - max(a[1], b[1]) + pixel
    shared = max(0.0, width) * max(0.0, height)
    areas = [(box[2] - box[0] + pixel) * (box[3] - box[1] + pixel) for box in (a, b)]
    union = sum(areas) - shared
    return shared / union if union > 0 else 0.0


def in_padded_square(box: Box, size: tuple[float, float]) -> Box:
    """A box in fractions of a picture [width, height], as fractions of the square around it, which centres it."""
    width, height = size
    side = max(size)
    left, top = (side - width) / 2, (side - height) / 2
    x1, y1, x2, y2 = box
    return (
        (x1 * width + left) / side,
        (y1 * height + top) / side,
        (x2 * width + left) / side,
        (y2 * height + top) / side,
    )


def gold_box(question: Question) -> Box:
    """Raises TaskDataError: the question's `answer_bbox` is no box."""
    text = question.row.get("answer_bbox", question.answers[0] if question.answers else "")
    try:
        x1, y1, x2, y2 = (float(value) for value in (json.loads(text) if isinstance(text, str) else text))
    except (TypeError, ValueError) as error:
        raise TaskDataError(f"question {question.id!r}: expected a box [x1, y1, x2, y2], found {text!r}") from error
    return x1, y1, x2, y2


def coin_box(text: str) -> Box | None:
    """As CoIN reads a prediction: no brackets, then its first and last character cut, then four numbers."""
    parts = text.replace("[", "").replace("]", "")[1:-1].split(",")
    try:
        x1, y1, x2, y2 = (float(part) for part in parts)
    except ValueError:
        return None
    return x1, y1, x2, y2


def first_box(text: str) -> Box | None:
    """The first four numbers with commas between them, if they are a box."""
    found = _FOUR.search(text)
    if found is None:
        return None
    x1, y1, x2, y2 = (float(number) for number in found.groups())
    return (x1, y1, x2, y2) if x1 < x2 and y1 < y2 else None


def _grounding(question: Question, text: str) -> float:
    box = coin_box(text)
    return float(box is not None and iou(box, gold_box(question)) > RIGHT)


def _grounded(question: Question, text: str, *, of_picture: bool) -> float:
    box = first_box(text)
    if box is not None and of_picture:
        box = in_padded_square(box, question.row["size"])
    return float(box is not None and iou(box, gold_box(question)) > RIGHT)


_SLIPS = (
    "CoIN eval_grounding and its copies: brackets are removed and then the first and the last character cut, so the "
    'last digit of y2 is lost: "[0.1,0.2,0.3,0.5]" has y2 = 0, "0.78" becomes 0.7, "1.00" becomes .00 as x1',
    '"(0.1,0.2,0.3,0.5)" and a final period are read correctly instead',
    "no box is checked; the model sees a centre crop (CoIN model_vqa), the gold box is in the padded square",
)
_DIFFERENCES = (
    "the first four numbers with commas between them are the box; corners that are exchanged are wrong",
    "with --boxes picture, predicted fractions of the picture are mapped to the padded square",
    "every question counts once",
)
GROUNDING = Rule(
    over_predictions(_grounding), over_questions(partial(_grounded, of_picture=False)), _SLIPS, _DIFFERENCES
)
GROUNDING_IN_PICTURE = Rule(
    GROUNDING.published, over_questions(partial(_grounded, of_picture=True)), _SLIPS, _DIFFERENCES
)


def _refcoco(questions: Sequence[Question], predictions: Sequence[Prediction]) -> Score:
    texts = by_id(predictions)
    each: list[float | None] = []
    start = end = -1  # bracket positions survive from the previous item
    for question in questions:
        text = texts.get(question.id)
        if text is None:
            each.append(None)
            continue
        start = text.find("[") if "[" in text else start
        end = text.find("]") if "]" in text else end
        try:
            x1, y1, x2, y2 = (float(value) for value in json.loads(text[start : end + 1]))
        except (TypeError, ValueError):
            each.append(None)
            continue
        width, height = question.row["size"]
        box = x1 * width, y1 * height, x2 * width, y2 * height
        each.append(float(iou(box, gold_box(question), pixel=1.0) > RIGHT))
    found = [value for value in each if value is not None]
    return Score({"accuracy": percent(sum(found), len(found))}, tuple(each), len(found))


def _refcoco_corrected(question: Question, text: str) -> float:
    """The prediction is in fractions of the padded square, the gold box in pixels of the picture."""
    box = first_box(text)
    if box is None:
        return 0.0
    width, height = question.row["size"]
    x1, y1, x2, y2 = gold_box(question)
    gold = in_padded_square((x1 / width, y1 / height, x2 / width, y2 / height), (width, height))
    return float(iou(box, gold) > RIGHT)


REFCOCO = Rule(
    _refcoco,
    over_questions(_refcoco_corrected),
    (
        "Adapt-infinity eval_ref: outputs that cannot be parsed leave the denominator",
        "coordinates are multiplied by width and height, although the model sees a padded square",
        "the positions of the brackets survive from the item before; IoU counts a pixel more on each side",
    ),
    ("predictions are fractions of the padded square", "what cannot be parsed is wrong", "IoU without the added pixel"),
)
