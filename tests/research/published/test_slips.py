"""Each slip of the published scripts: a test that shows it, with the corrected score beside it.

Those that concern one answer are cases of test_scorers.py; here are those of counting, pairing and whole files.
"""

from collections.abc import Sequence
from typing import Any

import pytest

from benchmarks.research.published.scorers import (
    boxes,
    captions,
    charts,
    exact,
    medicine,
    recognition,
    science_qa,
    vqa_text,
)
from benchmarks.research.published.scorers.next_qa import next_qa
from benchmarks.research.published.scorers.scored import Mode, Prediction, Question, Rule
from benchmarks.research.published.suites import SUITES
from inducekv_vllm.errors import TaskDataError

BOTH: tuple[Mode, Mode] = ("published", "corrected")


def question(name: str, gold: str | Sequence[str], **row: Any) -> Question:
    return Question(name, "", (gold,) if isinstance(gold, str) else tuple(gold), row)


def results(rule: Rule, questions: Sequence[Question], texts: Sequence[tuple[str, str]]) -> list[dict[str, float]]:
    """The metrics as published and as corrected."""
    predictions = [Prediction(*each) for each in texts]
    return [dict(rule.score(mode, questions, predictions).metrics) for mode in BOTH]


def accuracies(rule: Rule, questions: Sequence[Question], texts: Sequence[tuple[str, str]]) -> tuple[float, ...]:
    return tuple(next(iter(each.values())) for each in results(rule, questions, texts))


TWO = [question("1", "red"), question("2", "blue")]
RIGHT = [("1", "red"), ("2", "blue")]


def test_the_denominator_of_exact_matchers_is_the_number_of_predictions() -> None:
    assert accuracies(exact.EXACT, TWO, RIGHT[:1]) == (100, 50)
    twice = exact.EXACT.score("published", TWO, [Prediction("1", "red")] * 2 + [Prediction("2", "red")])
    assert twice.metrics["accuracy"] == pytest.approx(200 / 3)
    with pytest.raises(TaskDataError, match="no question has the id '3'"):
        exact.EXACT.score("published", TWO, [Prediction("3", "red")])


def test_cl_moe_has_exact_match_where_the_paper_names_vqa_accuracy() -> None:
    assert SUITES["vqa10"].task("color").rule().published is exact.EXACT.published


def test_mcitlib_takes_a_part_for_the_whole() -> None:
    assert accuracies(exact.PATH_VQA, [question("1", "no")], [("1", "I know")]) == (100, 0)


def test_ocr_vqa_counts_no_sample() -> None:
    """CoIN prints the length of an unused list; here the number is that of the predictions."""
    assert exact.OCR_VQA.score("published", TWO, [Prediction(*each) for each in RIGHT]).counted == 2
    assert "Samples: 0" in exact.OCR_VQA.slips[0]


def test_imagenet_pairs_by_line() -> None:
    assert accuracies(recognition.IMAGENET, TWO, RIGHT[::-1]) == (0, 100)
    assert accuracies(recognition.IMAGENET, TWO, [("2", "red"), ("1", "blue")]) == (100, 0)
    assert accuracies(recognition.IMAGENET, TWO, [("1", ""), ("2", "")]) == (100, 0)
    assert accuracies(recognition.IMAGENET, TWO, [("1", "red")]) == (100, 50)
    with pytest.raises(TaskDataError, match="3 predictions for 2 questions"):
        recognition.IMAGENET.score("published", TWO, [Prediction("1", "red")] * 3)


def test_gqa_counts_what_is_predicted_and_balanced() -> None:
    questions = [*TWO, question("3", "up", balanced=False)]
    assert accuracies(recognition.GQA, questions, RIGHT[:1]) == (100, 50)
    assert accuracies(recognition.GQA, questions, [*RIGHT, ("3", "down")]) == (100, 100)


def test_science_qa_forgives_missing_answers_in_hide_llava() -> None:
    questions = [question("1", "A", choices=2), question("2", "B", choices=2, has_image=True)]
    assert accuracies(science_qa.HIDE, questions, [("1", "A")]) == (100, 50)
    assert accuracies(science_qa.COIN, questions, [("1", "A")]) == (50, 50)
    assert results(science_qa.HIDE, questions, [("1", "A")])[0]["image_accuracy"] == 0
    none = science_qa.HIDE.score("published", questions[:1], [Prediction("1", "A")])
    assert none.metrics["image_accuracy"] == 0  # the script divides by zero


def test_letters_beyond_the_choices_are_wrong() -> None:
    assert accuracies(science_qa.COIN, [question("1", "C", choices=2)], [("1", "C")]) == (0, 0)


def test_text_vqa_asserts_ten_references() -> None:
    for mode in BOTH:
        with pytest.raises(TaskDataError, match="question '1': expected 10 references, found 9"):
            vqa_text.TEXT_VQA.score(mode, [question("1", ["red"] * 9)], [Prediction("1", "red")])


def test_vqacl_rounds_and_takes_fewer_references() -> None:
    questions = [question(str(number), ["red"] * 10) for number in range(3)]
    found = accuracies(vqa_text.VQA_V2, questions, [("0", "red"), ("1", "blue"), ("2", "blue")])
    assert found == (33.33, pytest.approx(100 / 3))
    few = vqa_text.VQA_V2.score("published", [question("1", ["red"] * 4)], [Prediction("1", "red")])
    assert few.metrics["accuracy"] == 100
    with pytest.raises(TaskDataError, match="expected 10 references, found 4"):
        vqa_text.VQA_V2.score("corrected", [question("1", ["red"] * 4)], [Prediction("1", "red")])


def test_grounding_counts_what_cannot_be_parsed() -> None:
    box = "[0.10,0.25,0.40,0.75]"
    questions = [question("1", box), question("2", box)]
    assert accuracies(boxes.GROUNDING, questions, [("1", box), ("2", "no box")]) == (50, 50)


def test_refcoco_leaves_out_what_cannot_be_parsed() -> None:
    """Of a square picture, where the padding is none."""
    square = [question(name, "[0,0,50,50]", size=[100, 100]) for name in "12"]
    right = ("1", "[0.0, 0.0, 0.5, 0.5]")
    assert accuracies(boxes.REFCOCO, square, [right, ("2", "nowhere")]) == (100, 50)
    # A text without brackets is cut where the one before had its own.
    stale = [("1", "x [0.0, 0.0, 0.5, 0.5]"), ("2", "0.0, 0.0, 0.5, 0.5")]
    assert boxes.REFCOCO.score("published", square, [Prediction(*each) for each in stale]).counted == 1


def test_medicine_leaves_wrong_answers_out_and_needs_the_order() -> None:
    questions = [question(name, "Yes", answer_type="CLOSED") for name in "123"]
    texts = [("1", "yes"), ("2", "no"), ("3", "no")]
    assert [each["closed_accuracy"] for each in results(medicine.MEDICINE, questions, texts)] == pytest.approx(
        [100, 100 / 3]
    )
    with pytest.raises(TaskDataError, match="in their order"):
        medicine.MEDICINE.score("published", questions, [Prediction(*each) for each in texts[::-1]])
    opened = [question("1", "left lung", answer_type="OPEN")]
    exacts = [each["open_exact"] for each in results(medicine.MEDICINE, opened, [("1", "the left lung now")])]
    assert exacts == pytest.approx([200 / 3, 0])  # two of three words, an article left out; no equality


def test_deplot_stores_recall_as_f1_and_overwrites_repeated_keys() -> None:
    table = "Year | Sales\n2001 | 10\n2002 | 20"
    more = table + "\n2003 | 30\n2004 | 40"
    found = results(charts.CHART_TO_TABLE, [question("1", table)], [("1", more)])
    assert [each["rms_f1"] for each in found] == pytest.approx([100, 200 / 3])
    repeated = "Year | Sales\n2001 | 10\n2001 | 20"
    assert len(charts.data_points(repeated, transposed=False, published=True)) == 1
    assert len(charts.data_points(repeated, transposed=False, published=False)) == 2
    short = "Year | Sales | Cost\n2001 | 10"
    assert len(charts.data_points(short, transposed=False, published=True)) == 1
    assert len(charts.data_points(short, transposed=False, published=False)) == 2


def test_next_qa_looks_for_types_that_do_not_exist() -> None:
    def never(a: str, b: str) -> float:
        return float(a == b)

    counted = [question("1", "two", type="DC")]
    assert accuracies(next_qa(never), counted, [("1", "2")]) == (100, 100)  # published: an empty product
    assert accuracies(next_qa(never), counted, [("1", "3")]) == (100, 0)


CAPTIONED = [
    question("7", ["a dog runs on grass", "a brown dog is running"]),
    question("3", ["two cats sleep on a bed", "cats lie on the bed"]),
    question("5", ["a red bus drives by", "the bus is red"]),
]
WRITTEN = [("7", "a dog runs on grass"), ("3", "two cats sleep on a bed"), ("5", "a red bus drives by")]


@pytest.fixture
def without_java(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(captions, "has_java", lambda: False)


@pytest.mark.usefixtures("without_java")
def test_captions_are_paired_by_line() -> None:
    straight = results(captions.CAPTIONS, CAPTIONED, WRITTEN)
    shifted = results(captions.CAPTIONS, CAPTIONED, [WRITTEN[1], WRITTEN[2], WRITTEN[0]])
    assert straight[0]["Bleu_4"] == straight[1]["Bleu_4"] == pytest.approx(100)
    assert shifted[0]["CIDEr"] < straight[0]["CIDEr"] / 10
    assert shifted[1] == straight[1]
    with pytest.raises(TaskDataError, match="expected 3 captions, one a line, found 2"):
        captions.CAPTIONS.score("published", CAPTIONED, [Prediction(*each) for each in WRITTEN[:2]])
    assert results(captions.CAPTIONS, CAPTIONED[:1], WRITTEN[:1])[1]["ROUGE_L"] == 100


@pytest.mark.usefixtures("without_java")
def test_the_published_average_of_captions_has_cider_and_four_bleus() -> None:
    published, corrected = results(captions.CAPTIONS, CAPTIONED, WRITTEN)
    measures = ["Bleu_1", "Bleu_2", "Bleu_3", "Bleu_4", "ROUGE_L", "CIDEr"]  # METEOR is absent without Java
    assert "METEOR" not in published
    assert published["average"] == pytest.approx(sum(published[name] for name in measures) / 6)
    assert published["CIDEr"] > 100
    assert next(iter(corrected)) == "cider"


@pytest.mark.usefixtures("without_java")
def test_rouge_mixes_references() -> None:
    """Precision 1 from the long reference, recall 1 from the short one: together 1, though neither is equal."""
    questions = [question("1", ["a dog runs on the green grass", "a dog"])]
    published, corrected = results(captions.CAPTIONS, questions, [("1", "a dog runs")])
    assert published["ROUGE_L"] == pytest.approx(100)
    p, r = 2 / 3, 1.0  # of "a dog"
    of_long = 2.44 * 1 * (3 / 7) / (3 / 7 + 1.44)
    assert corrected["ROUGE_L"] == pytest.approx(100 * max(2.44 * p * r / (r + 1.44 * p), of_long))


@pytest.mark.usefixtures("without_java")
def test_smolora_keeps_one_reference_and_exchanges_the_sides() -> None:
    rule = captions.SMOLORA
    assert accuracies(rule, CAPTIONED, WRITTEN)[0] == pytest.approx(1000)  # each equals its kept reference
    assert accuracies(rule, CAPTIONED, WRITTEN)[1] < 1000
    assert captions.follows_instruction("A dog runs on the grass.")
    assert not captions.follows_instruction("A dog runs.")


def test_captions_tokenised_with_java_and_without() -> None:
    text = "A dog, and a cat (black) -- run!"
    expected = "a dog and a cat -lrb- black -rrb- run"
    assert captions.split_without_java(text) == expected
    if captions.has_java():
        assert captions.tokenised({1: [text]}) == {1: [expected]}
        found = captions.CAPTIONS.score("published", CAPTIONED, [Prediction(*each) for each in WRITTEN])
        assert found.metrics["METEOR"] == pytest.approx(100)


def test_every_rule_says_what_differs() -> None:
    for suite in SUITES.values():
        for task in suite.tasks:
            for rule in task.rules.values():
                assert rule.slips
                assert rule.differences
