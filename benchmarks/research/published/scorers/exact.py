"""Answers that must equal the gold one: UCIT's four tasks of this kind, CoIN's, and the ten question types of VQAv2."""

from __future__ import annotations

import re

from .scored import Question, Rule, over_predictions, over_questions

_OPTION = re.compile(r"^\(?([A-Z])(?:[).:]|\s|$)")
_OPTION_LINE = re.compile(r"^\(?([A-Z])[).:]\s*(.+)$", re.MULTILINE)


def plain(text: str) -> str:
    """Without case, the space around it and the periods behind it."""
    return text.strip().rstrip(".").strip().casefold()


def options_of(prompt: str) -> dict[str, str]:
    """The lettered options of a prompt, one a line."""
    return {letter: text.strip() for letter, text in _OPTION_LINE.findall(prompt)}


def _equal_in_upper_case(question: Question, text: str) -> float:
    return float(text.upper() == question.answers[0].upper())


def _equal_in_lower_case(question: Question, text: str) -> float:
    return float("Unanswerable" not in text and text.lower() == question.answers[0].lower())


def _contains(question: Question, text: str) -> float:
    if "Unanswerable" in text:
        return 0.0
    return float(question.answers[0].lower() in text.lower())


def answered(question: Question, text: str) -> float:
    """Whether the answer is right: equal but for case and final periods, or the letter of the right option.

    Where the gold answer is a letter, "B.", "(B)", "B. right" and "right" answer B.
    """
    gold = question.answers[0].strip()
    if plain(text) == plain(gold):
        return 1.0
    if re.fullmatch("[A-Z]", gold):
        named = _OPTION.match(text.strip())
        if named and len(text.strip()) > 1:
            return float(named[1] == gold)
        return float(plain(text) == plain(options_of(question.prompt).get(gold, gold)))
    return 0.0


_CORRECTED = over_questions(answered)
_DIFFERENCES = (
    "case, surrounding space and final periods do not matter",
    'where the gold answer is a letter, "B.", "(B) right" and the text of option B answer B',
    "every question counts once: one without a prediction is wrong",
)

EXACT = Rule(
    over_predictions(_equal_in_upper_case),
    _CORRECTED,
    (
        'HiDe-LLaVA llava/eval/eval_deepseek_r1.py, CoIN eval_vizwiz, eval_vqav2: "B." and "B. right" are wrong for B, '
        '"yes." for yes',
        "the denominator is the number of predictions: questions without one vanish, repeated ones count twice",
    ),
    _DIFFERENCES,
)
CLMOE = Rule(
    EXACT.published,
    _CORRECTED,
    ("CL-MoE eval_vqav2: equality with one answer, where the paper names VQA accuracy", *EXACT.slips[1:]),
    _DIFFERENCES,
)
OCR_VQA = Rule(
    over_predictions(_equal_in_lower_case),
    _CORRECTED,
    (
        "CoIN eval_ocrvqa writes `Samples: 0`, the length of a list that nothing fills",
        'a prediction that contains "Unanswerable" is wrong, whatever the gold answer',
    ),
    _DIFFERENCES,
)
# MCITlib's medical task, which is not the paper's.
PATH_VQA = Rule(
    over_predictions(_contains),
    _CORRECTED,
    ('MCITlib eval_pvqa: right if the gold answer is a part of the prediction, so "know" is right for "no"',),
    _DIFFERENCES,
)
