"""ScienceQA: the letter that an answer names.

A question's row has `choices`, the number of options, and `has_image`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from .exact import options_of, plain
from .scored import Prediction, Question, Rule, Score, Scorer, by_id, over_questions, percent

LETTERS = "ABCDE"
_SAYS = re.compile(r"The answer is ([A-Z])\.")
_LEADS = re.compile(r"^\(?([A-E])(?:[).:,]|$)")
_SAYS_ANYHOW = re.compile(r"answer is:?\s*\(?([A-E])\b", re.IGNORECASE)
_STANDS_ALONE = re.compile(
    r"\(([A-E])\)|\b(?:option|choice|letter)\s+([A-E])\b|(?<![\w'])([B-E])(?![\w'])"
    r"|(?<![\w'])(A)(?=\s+(?:and|or)\b|\s*[,.;:]|\s*$)"  # no article
)


def coin_letter(text: str) -> str | None:
    """As CoIN reads it: the whole text, or what is before ". ", or else the first word of one character."""
    if text in LETTERS and text:
        return text
    if len(text) >= 3 and text[0] in LETTERS and text[1:3] == ". ":
        return text[0]
    return next((word.upper() for word in text.split() if len(word) == 1), None)


def hide_letter(text: str) -> str | None:
    """As HiDe-LLaVA and SEFE read it: the whole text, or what is before ". ", or a single "The answer is X."."""
    if text in LETTERS and text:
        return text
    if len(text) >= 3 and text[0] in LETTERS and text[1:3] == ". ":
        return text[0]
    found = _SAYS.findall(text)
    return found[0] if len(found) == 1 else None


def letter_of(question: Question, text: str) -> str | None:
    """The option that an answer names, by its letter or its text; None: none, or one that the question has not."""
    text = text.strip()
    options = options_of(question.prompt)
    by_text = next((letter for letter, option in options.items() if plain(option) == plain(text)), None)
    leads = _LEADS.match(text)
    said = {letter.upper() for letter in _SAYS_ANYHOW.findall(text)}
    said = said or {next(filter(None, groups)) for groups in _STANDS_ALONE.findall(text)}
    letter = by_text or (leads[1] if leads else None) or (said.pop() if len(said) == 1 else None)
    if letter is None and len(bare := text.strip("().: ")) == 1:
        letter = bare.upper()
    known = LETTERS[: question.row.get("choices", len(options) or len(LETTERS))]
    return letter if letter and letter in known else None


def _published(letter_in: Callable[[str], str | None], *, all_problems: bool) -> Scorer:
    def score(questions: Sequence[Question], predictions: Sequence[Prediction]) -> Score:
        texts = by_id(predictions)

        def judged(question: Question) -> float:
            letter = letter_in(texts[question.id])
            known = LETTERS[: question.row.get("choices", len(LETTERS))]
            return float(letter is not None and letter in known and letter == question.answers[0])

        each = tuple(judged(question) if question.id in texts else None for question in questions)
        found = [value for value in each if value is not None]
        counted = len(questions) if all_problems else len(found)
        pictured = [value for question, value in zip(questions, each, strict=True) if question.row.get("has_image")]
        of_pictures = sum(value for value in pictured if value is not None)
        metrics = {"accuracy": percent(sum(found), counted), "image_accuracy": percent(of_pictures, len(pictured))}
        return Score(metrics, each, counted)

    return score


def _judged(question: Question, text: str) -> float:
    return float(letter_of(question, text) == question.answers[0])


_DIFFERENCES = (
    'a letter counts where it leads ("B.", "(B)", "B: right"), is said ("the answer is B") or is the only one that '
    'stands alone; the article "a" is none; the text of an option names it',
    "the denominator is the number of questions: one without a prediction is wrong",
)
COIN = Rule(
    _published(coin_letter, all_problems=True),
    over_questions(_judged),
    (
        'CoIN eval_science_qa: the first word of one character is the answer: "It is a dog, option B" is A',
        "letters beyond the number of choices, digits and I are answers, wrong ones",
    ),
    _DIFFERENCES,
)
HIDE = Rule(
    _published(hide_letter, all_problems=False),
    over_questions(_judged),
    (
        "HiDe-LLaVA and SEFE eval_science_qa: the denominator is the number of predictions; missing ones are forgiven",
        "HiDe-LLaVA: without a question with a picture the script divides by zero (0 here)",
        "HiDe-LLaVA model_science_qa: the sentence that asks for the letter is added to prompts that have it",
    ),
    _DIFFERENCES,
)
# Adapt-infinity's, which is LLaVA's.
LLAVA = Rule(
    _published(hide_letter, all_problems=True), HIDE.corrected, ("only 'The answer is X.' is understood",), _DIFFERENCES
)
