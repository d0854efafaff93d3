"""Every scorer on cases that were computed by hand, as published and as corrected."""

from collections.abc import Sequence
from typing import Any

import pytest

from benchmarks.research.published.scorers import (
    boxes,
    charts,
    exact,
    language,
    medicine,
    recognition,
    science_qa,
    vqa_text,
)
from benchmarks.research.published.scorers.next_qa import next_qa
from benchmarks.research.published.scorers.scored import Prediction, Question, Rule, Score

OPTIONS = "Which is larger?\nA. left\nB. right\nC. neither"


def one(rule: Rule, gold: str | Sequence[str], text: str, prompt: str = "", **row: Any) -> tuple[float, float]:
    """The score of one prediction, as published and as corrected."""
    answers = (gold,) if isinstance(gold, str) else tuple(gold)
    question = Question("q", prompt, answers, row)
    found: list[Score] = [rule.score(mode, [question], [Prediction("q", text)]) for mode in ("published", "corrected")]
    published, corrected = (each.questions[0] for each in found)
    assert published is not None
    assert corrected is not None
    return published, corrected


# By rule: what is right, what is said, and its score as published and as corrected.
ANSWERS: dict[Rule, list[tuple[str | list[str], str, float, float]]] = {
    exact.EXACT: [
        ("teapot", "Teapot", 1, 1),
        ("teapot", "teapot.", 0, 1),
        ("teapot", " teapot ", 0, 1),
        ("teapot", "a teapot", 0, 0),
        ("B", "b", 1, 1),
        ("B", "B. right", 0, 1),
        ("B", "(B) right", 0, 1),
        ("B", "right", 0, 1),
        ("B", "A. left", 0, 0),
        ("B", "But why", 0, 0),
        ("12", "", 0, 0),
    ],
    exact.OCR_VQA: [
        ("Unanswerable", "Unanswerable", 0, 1),
        ("unanswerable", "unanswerable", 1, 1),
        ("Mary Smith", "mary smith.", 0, 1),
        ("yes", "Yes", 1, 1),
        ("yes", "Yes, Unanswerable", 0, 0),
        ("1999", "1999 ", 0, 1),
        ("1999", "199", 0, 0),
    ],
    vqa_text.VQA_V2: [
        (["zero"] * 10, "zero", 0, 1),
        (["the beach"] * 10, "the beach", 0, 1),
        (["red"] * 10, "Red.", 1, 1),
        (["two"] * 5 + ["three"] * 5, "two", 0, 1),
        (["2"] * 5 + ["two"] * 5, "two", 1, 1),
        (["Red"] * 5 + ["blue"] * 5, "red", 0, 1),
        (["no!"] * 5 + ["yes"] * 5, "no", 0, 1),  # "no " after the punctuation
        (["dog\n"] * 10, "dog", 1, 1),
    ],
    vqa_text.VQA_LABELS: [
        ("-", "2", 1.0, 1.0),
        ("-", "two", 0.0, 1.0),
        ("-", "Two!", 0.0, 1.0),
        ("-", " 2", 0.0, 1.0),
        ("-", "the 3", 0.0, 0.3),
        ("-", "", 0.0, 0.0),
    ],
    recognition.GQA: [
        ("left", "Left.", 1, 1),
        ("left", "left..", 1, 1),
        ("left", "left .", 0, 1),
        ("left", " left", 0, 1),
        ("Left", "Left", 0, 1),
        ("no", "nope", 0, 0),
        ("2", "two", 0, 0),
    ],
    charts.CHART_QA: [
        ("100", "105", 1, 1),
        ("100", "105.1", 0, 0),
        ("0", "0.0", 0, 1),
        ("50", "50%", 0, 1),
        ("50%", "52%", 1, 1),
        ("1000", "1,000", 0, 1),
        ("$5", "5", 0, 1),
        ("Red", " red", 0, 1),
        ("-10", "-10.4", 1, 1),
    ],
    language.MMLU: [
        ("B", "b.", 1, 1),
        ("B", "B. right", 0, 1),
        ("B", "The answer is B", 0, 1),
        ("B", "", 0, 0),
        ("B", "E", 0, 0),
        ("B", "right", 0, 1),
        ("B", "A and B", 0, 0),
    ],
}
# What a question has besides.
MORE: dict[Rule, dict[str, Any]] = {
    exact.EXACT: {"prompt": OPTIONS},
    language.MMLU: {"prompt": OPTIONS},
    vqa_text.VQA_LABELS: {"label": {"2": 1.0, "3": 0.3}},
}


@pytest.mark.parametrize(("rule", "answer"), [(rule, answer) for rule, found in ANSWERS.items() for answer in found])
def test_an_answer(rule: Rule, answer: tuple[str | list[str], str, float, float]) -> None:
    gold, text, *expected = answer
    assert one(rule, gold, text, **MORE.get(rule, {})) == tuple(expected)


@pytest.mark.parametrize(
    ("text", "published", "corrected"),
    [
        ("two dogs", "2 dogs", "2 dogs"),
        ("The Beach", "beach", "beach"),
        ("t-shirt", "t shirt", "t shirt"),
        ("yes, it is!", "yes it is", "yes it is"),
        ("dont", "don't", "don't"),
        ("bob's", "bob 's", "bob 's"),
        ("3.", "3", "3"),
        ("3.5", "3.5", "3.5"),
        ("5.x", "5x", "5x"),
        ("1,000", "1000", "1000"),
        ("none", "0", "0"),
        ("Im", "im", "i'm"),
        ("somebody'd", "somebodyd", "somebody'd"),
        ("a / b", "b", "b"),
        (" - ".join(["x."] * 40), " ".join(["x"] * 32 + ["x."] * 8), " ".join(["x"] * 40)),
    ],
)
def test_the_normaliser_of_text_vqa(text: str, published: str, corrected: str) -> None:
    assert vqa_text.m4c_normalised(text, published=True) == published
    assert vqa_text.m4c_normalised(text, published=False) == corrected


@pytest.mark.parametrize(
    ("matches", "expected"), [(0, 0.0), (1, 0.3), (2, 0.6), (3, 0.9), (4, 1.0), (9, 1.0), (10, 1.0)]
)
def test_soft_accuracy(matches: int, expected: float) -> None:
    gold = ["cat"] * matches + ["dog"] * (10 - matches)
    assert one(vqa_text.TEXT_VQA, gold, "The cat") == pytest.approx((expected, expected))
    assert one(vqa_text.VQA_V2, gold, "cat") == pytest.approx((expected, expected))


@pytest.mark.parametrize(
    ("text", "coin", "hide", "corrected"),
    [
        ("B. right", 1, 1, 1),
        ("B.", 0, 0, 1),
        ("The answer is B.", 0, 1, 1),
        ("the answer is B", 1, 0, 1),
        ("It is a dog, option B", 0, 0, 1),
        ("E. none", 0, 0, 0),
        ("right", 0, 0, 1),
        ("It is a dog", 0, 0, 0),
        ("The answer is B. The answer is C.", 0, 0, 0),
        ("A or B", 0, 0, 0),
        ("", 0, 0, 0),
    ],
)
def test_science_qa(text: str, coin: float, hide: float, corrected: float) -> None:
    given = {"prompt": OPTIONS, "choices": 3}
    assert one(science_qa.COIN, "B", text, **given) == (coin, corrected)
    assert one(science_qa.HIDE, "B", text, **given) == (hide, corrected)


@pytest.mark.parametrize(
    ("text", "published", "without_case", "corrected"),
    [
        ("Tabby cat", 0, 1, 1),
        ("a tabby cat", 1, 1, 1),
        ("It is a tabby cat.", 1, 1, 1),
        ("cat", 1, 1, 0),
        ("a", 1, 1, 0),
        ("", 1, 1, 0),
        ("tabby cats", 1, 1, 0),
        ("TABBY", 0, 1, 0),
    ],
)
def test_imagenet(text: str, published: float, without_case: float, corrected: float) -> None:
    assert one(recognition.IMAGENET, "tabby cat", text) == (published, corrected)
    assert one(recognition.SMOLORA_IMAGENET, "tabby cat", text) == (without_case, corrected)


@pytest.mark.parametrize(
    ("gold", "text", "published", "corrected"),
    [
        ("[0.1,0.2,0.3,0.5]", "[0.1,0.2,0.3,0.5]", 0, 1),  # y2 becomes 0.
        ("[0.1,0.2,0.3,0.5]", "(0.1,0.2,0.3,0.5)", 1, 1),
        ("[0.1,0.2,0.3,0.5]", "[0.1,0.2,0.3,0.5].", 1, 1),
        ("[0.1,0.25,0.4,0.78]", "[0.1,0.25,0.4,0.78]", 1, 1),  # 0.7 of 0.78: an IoU of 0.45 / 0.53
        ("[0.10,0.50,0.40,0.59]", "[0.10,0.50,0.40,0.59]", 0, 1),  # y2 becomes 0.5
        ("[0.10,0.25,0.40,0.75]", "The cup is at [0.10, 0.25, 0.40, 0.75]", 0, 1),
        ("[0.10,0.25,0.40,0.75]", "[0.10,0.25,0.40]", 0, 0),
        ("[0.10,0.25,0.40,0.75]", "nowhere", 0, 0),
        ("[0,0,0.5,0.50]", "[0.0,0.0,0.5,0.250]", 0, 0),  # exactly half
        ("[0,0,0.5,0.50]", "[0.0,0.0,0.5,0.260]", 1, 1),
        ("[0.10,0.25,0.40,0.75]", "[0.40,0.75,0.10,0.250]", 0, 0),  # corners exchanged
    ],
)
def test_grounding(gold: str, text: str, published: float, corrected: float) -> None:
    assert one(boxes.GROUNDING, gold, text, answer_bbox=gold, size=[640, 480]) == (published, corrected)


@pytest.mark.parametrize(
    ("size", "gold", "text", "published", "corrected"),
    [
        ([100, 100], "[0,0,50,50]", "[0.0, 0.0, 0.5, 0.5]", 1, 1),
        ([100, 100], "[0,0,50,50]", "It is at [0.0, 0.0, 0.5, 0.5].", 1, 1),
        ([100, 100], "[0,0,50,50]", "[0.5, 0.5, 1.0, 1.0]", 0, 0),
        ([100, 100], "[0,0,50,50]", "[0.5, 0.5, 0.0, 0.0]", 0, 0),  # corners exchanged
        ([100, 100], "[0,0,10,10]", "[0.0, 0.0, 0.1, 0.05]", 1, 0),  # a pixel more on each side: 66 of 121
        ([200, 100], "[0,0,100,50]", "[0.0, 0.25, 0.5, 0.5]", 1, 1),  # padded: 101 x 26 of 101 x 51
        ([200, 100], "[0,0,100,40]", "[0.0, 0.25, 0.5, 0.45]", 0, 1),
        ([200, 100], "[0,0,100,100]", "[0.0, 0.0, 0.5, 1.0]", 1, 0),  # of the picture: half of the square's box
        ([100, 200], "[0,0,40,100]", "[0.25, 0.0, 0.45, 0.5]", 0, 1),
        ([100, 100], "[0,0,50,50]", "[0.0, 0.0, 0.5, 0.24]", 0, 0),
    ],
)
def test_refcoco(size: list[int], gold: str, text: str, published: float, corrected: float) -> None:
    assert one(boxes.REFCOCO, gold, text, answer_bbox=gold, size=size) == (published, corrected)


def test_a_box_of_the_picture_in_the_padded_square() -> None:
    """640 x 480: bars of 80 pixels above and below, of a square of 640."""
    assert boxes.in_padded_square((0.0, 0.0, 1.0, 1.0), (640, 480)) == (0.0, 0.125, 1.0, 0.875)
    assert boxes.in_padded_square((0.5, 0.5, 1.0, 1.0), (480, 640)) == (0.5, 0.5, 0.875, 1.0)
    row = {"answer_bbox": "[0.0,0.125,0.5,0.5]", "size": [640, 480]}
    assert one(boxes.GROUNDING_IN_PICTURE, "-", "[0.0,0.0,0.5,0.500]", **row)[1] == 1


def test_intersection_over_union() -> None:
    assert boxes.iou((0, 0, 2, 2), (1, 1, 3, 3)) == pytest.approx(1 / 7)
    assert boxes.iou((0, 0, 1, 1), (2, 2, 3, 3)) == 0
    assert boxes.iou((1, 1, 1, 1), (1, 1, 1, 1)) == 0
    assert boxes.iou((0, 0, 1, 1), (0, 0, 1, 1), pixel=1.0) == 1


@pytest.mark.parametrize(
    ("kind", "gold", "text", "published", "corrected"),
    [
        ("CLOSED", "No", "normal", 1, 0),
        ("CLOSED", "Yes", "maybe", 0, 0),
        ("CLOSED", "Left", "left", 0, 1),
        ("CLOSED", "Left", "no, left", 1, 1),
        ("CLOSED", "Yes", "Yes, it is enlarged.", 1, 1),
        ("OPEN", "left lung", "left left left", 3 / 4, 1 / 2),
        ("OPEN", "left lung", "the left lung", 1, 1),
        ("OPEN", "two ribs", "2 ribs broken", 1, 1),
    ],
)
def test_medicine(kind: str, gold: str, text: str, published: float, corrected: float) -> None:
    assert one(medicine.MEDICINE, gold, text, answer_type=kind) == pytest.approx((published, corrected))


TABLE = "Year | Sales\n2001 | 10\n2002 | 20"


@pytest.mark.parametrize(
    ("text", "recall", "f1"),
    [
        (TABLE, 1.0, 1.0),
        (TABLE.upper(), 1.0, 1.0),
        ("Year | 2001 | 2002\nSales | 10 | 20", 1.0, 1.0),  # transposed
        ("Year | Sales\n2001 | 10", 0.5, 2 / 3),
        ("Year | Sales\n2001 | 10\n2002 | 20\n2003 | 30", 1.0, 0.8),
        ("Year | Sales\n2001 | 10.5\n2002 | 20", (0.95 + 1) / 2, (0.95 + 1) / 2),
        ("Year | Sales\n2001 | 11\n2002 | 20", 0.5, 0.5),  # an error of a tenth counts as 1
        ("Year | Sales\n2001 | ten\n2002 | 20", 0.5, 0.5),
        ("", 0.0, 0.0),
        ("Title | Shop\n" + TABLE, 1.0, 0.8),
        ("nothing | here", 0.0, 0.0),
    ],
)
def test_mapping_of_tables(text: str, recall: float, f1: float) -> None:
    found = charts.rms(TABLE, text, published=False)
    assert (found[1], found[2]) == pytest.approx((recall, f1))
    assert one(charts.CHART_TO_TABLE, TABLE, text) == pytest.approx((recall, f1))  # published: recall as F1


def test_edit_distances() -> None:
    assert charts.anls("abcd", "abcd") == 1
    assert charts.anls("abcd", "abcx") == 0.75
    assert charts.anls("abcd", "axyz") == 0
    assert charts.anls("", "") == 1


def test_bleu_of_chart_texts() -> None:
    question = Question("q", "", ("the sales rise in every year of the chart",))
    for mode in ("published", "corrected"):
        same = charts.CHART_TO_TEXT.score(mode, [question], [Prediction("q", question.answers[0])])
        other = charts.CHART_TO_TEXT.score(mode, [question], [Prediction("q", "nothing")])
        assert same.metrics["bleu4"] == pytest.approx(100)
        assert other.metrics["bleu4"] == 0


def similarity(a: str, b: str) -> float:
    """Made up: a dog and a puppy are 0.9 alike, to run and to walk 0.6."""
    return 1.0 if a == b else {("dog", "puppy"): 0.9, ("run", "walk"): 0.6}.get((min(a, b), max(a, b)), 0.0)


@pytest.mark.parametrize(
    ("kind", "gold", "text", "published", "corrected"),
    [
        ("DO", ["dog"], "dog", 1, 1),
        ("DO", ["dog"], "puppy", 0.9, 0.9),
        ("DO", ["dog"], "cat", 1, 0),  # no similar word: the product of nothing
        ("DO", ["dog run"], "puppy walk", 0.54, 0.54),
        ("DO", ["dog run"], "dog", 1, 0),
        ("DC", ["two"], "two", 1, 1),  # "2" has no similar word
        ("DB", ["yes"], "puppy", 1, 0),
        ("CW", ["dog", "cat"], "cat", 1, 1),
        ("CW", ["run", "walk"], "walk", 0.6, 1),
        ("CW", ["the dog"], "a dog", 1, 1),
        ("CW", ["dog"], "", 0, 0),
    ],
)
def test_next_qa(kind: str, gold: list[str], text: str, published: float, corrected: float) -> None:
    assert one(next_qa(similarity), gold, text, type=kind) == pytest.approx((published, corrected))


def test_bleu_of_characters_and_of_words() -> None:
    published, corrected = one(language.MULTILINGUAL, "two boats on a lake", "two boats on a sea")
    assert published > corrected > 0  # of characters more are alike
    assert one(language.MULTILINGUAL, "两只小船在湖上", "两只小船在湖上") == pytest.approx((1, 1))
    assert language.words_of("Two 小船 boats") == ["two", "小", "船", "boats"]


@pytest.mark.parametrize(
    ("reply", "published", "corrected"),
    [
        ("7.5", 7.5, 7.5),
        ("8/10", 8.0, 8.0),
        ("8.5/10", 0.0, 8.5),
        ("Score: 10", 1.0, 10.0),
        ("I give 0", None, 0.0),
        ("none", None, None),
        (" 9 ", 9.0, 9.0),
        ("about 6.5 of 10", 6.0, 6.5),
    ],
)
def test_replies_of_the_judge(reply: str, published: float | None, corrected: float | None) -> None:
    assert language.judged_score(reply, published=True) == published
    assert language.judged_score(reply, published=False) == corrected
