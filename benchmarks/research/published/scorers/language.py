"""Adapt-infinity's evaluators of text: MMLU and captions in Chinese; and the reply of CoIN's judge."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial

from .science_qa import letter_of
from .scored import Prediction, Question, Rule, Score, over_predictions, over_questions

_CHINESE = re.compile(r"[\u4e00-\u9fff]")


def _mmlu(question: Question, text: str) -> float:
    letter = text.replace(".", "").strip().lower()
    return float(letter in ("a", "b", "c", "d") and letter == question.answers[0].lower())


def _mmlu_corrected(question: Question, text: str) -> float:
    return float((letter_of(question, text) or "").lower() == question.answers[0].lower())


MMLU = Rule(
    over_predictions(_mmlu),
    over_questions(_mmlu_corrected),
    ("Adapt-infinity model_mmlu: the whole output must be one letter; the validation split is asked",),
    ('"B. right", "(B)" and "the answer is B" are B, too', "every question counts once"),
)


def _sentence_bleu(references: Sequence[Sequence[str]], words: Sequence[str]) -> float:
    from nltk.translate.bleu_score import SmoothingFunction, sentence_bleu

    if not words:
        return 0.0
    return float(sentence_bleu(references, words, smoothing_function=SmoothingFunction().method4))


def words_of(text: str) -> list[str]:
    """Words in lower case; of Chinese each character is one."""
    return _CHINESE.sub(lambda sign: f" {sign[0]} ", text.lower()).split()


def _bleu(question: Question, text: str, *, published: bool) -> float:
    if published:  # plain strings: their characters
        return _sentence_bleu(question.answers, text)
    return _sentence_bleu([words_of(answer) for answer in question.answers], words_of(text))


def _fraction(questions: Sequence[Question], predictions: Sequence[Prediction]) -> Score:
    found = over_predictions(partial(_bleu, published=True), "bleu4")(questions, predictions)
    return Score({"bleu4": found.metrics["bleu4"] / 100}, found.questions, found.counted)


MULTILINGUAL = Rule(
    _fraction,
    over_questions(partial(_bleu, published=False), "bleu4"),
    (
        "Adapt-infinity model_caption: BLEU gets plain texts, so it counts n-grams of characters, in English, too",
        "the value is 0 to 1, beside others of 0 to 100",
    ),
    ("n-grams of words, in Chinese of characters", "in percent", "every question counts once"),
)


def judged_score(reply: str, *, published: bool) -> float | None:
    """The number that CoIN's judge gives an answer; None: it gives none.

    Published (ETrain/Eval/evaluate_score.py): a reply that is no number is read as "x/y" if x has digits alone (0
    otherwise), or by its first digit from 1 to 9: "8.5/10" is 0, and "Score: 10" is 1.
    """
    text = reply.strip()
    try:
        return float(text)
    except ValueError:
        pass
    if published:
        if "/" in text:
            given = text.split("/")[0].strip()
            return float(given) if given.isdigit() else 0.0
        digit = re.search("[1-9]", text)
        return float(digit[0]) if digit else None
    number = re.search(r"\d+(?:\.\d+)?", text)
    return float(number[0]) if number else None
