"""VQA's soft accuracy over ten references, and the normaliser of answers that its evaluators share.

TextVQA's published one is CoIN's m4c_evaluator (SEFE, MCITlib and Adapt-infinity have the same file), VQACL's its
VQAEvaluator.evaluate_raw.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial

from inducekv_vllm.errors import TaskDataError

from .scored import Question, Rule, Score, Scorer, over_predictions, over_questions

REFERENCES, ENOUGH = 10, 3
MARKS = ';/[]"{}()=+\\_-><@`,?!'
ARTICLES = frozenset({"a", "an", "the"})
_WORDS = ["none", "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
NUMBERS = dict(zip(_WORDS, ["0", *map(str, range(11))], strict=True))
CONTRACTIONS = """
    ain't aren't can't could've couldn't couldn't've didn't doesn't don't hadn't hadn't've hasn't haven't he'd he'd've
    he's how'd how'll how's isn't it'd it'd've it'll ma'am mightn't mightn't've might've mustn't must've needn't not've
    o'clock oughtn't 'ow's'at shan't she'd've should've shouldn't shouldn't've somebody'd've somebody'll somebody's
    someone'd someone'd've someone'll someone's something'd something'd've something'll that's there'd there'd've
    there're there's they'd they'd've they'll they're they've 'twas wasn't we'd've we've weren't what'll what're what's
    what've when's where'd where's where've who'd who'd've who'll who's who've why'll why're why's won't would've
    wouldn't wouldn't've y'all y'all'll y'all'd've you'd you'd've you'll you're you've
""".split()  # noqa: SIM905
_SHORT = {word[:at] + word[at + 1 :]: word for word in CONTRACTIONS for at, letter in enumerate(word) if letter == "'"}
_CORRECT_SHORT = {**_SHORT, "somebodyd": "somebody'd", "im": "i'm", "ive": "i've", "id've": "i'd've", "i'dve": "i'd've"}
_PUBLISHED_SHORT = {**_SHORT, "somebody'd": "somebodyd"}  # the wrong way round; keys with capitals never fire
_THOUSANDS = re.compile(r"(?<=\d),+(?=\d)")
_PERIOD = re.compile(r"\.(?!\d)")  # as written, the look-behind of the published pattern excludes nothing
_PERIODS_REMOVED = 32  # re.UNICODE, passed as the number of replacements


def without_marks(text: str, *, published: bool) -> str:
    """Marks next to a space deleted, others made a space, and periods deleted unless a digit follows."""
    everywhere = _THOUSANDS.search(text) is not None
    out = text
    for mark in MARKS:
        out = out.replace(mark, "" if everywhere or f"{mark} " in text or f" {mark}" in text else " ")
    return _PERIOD.sub("", out, count=_PERIODS_REMOVED if published else 0)


def simple_words(text: str, *, published: bool) -> str:
    """In lower case, numbers as digits, without articles, contractions with their apostrophe."""
    short = _PUBLISHED_SHORT if published else _CORRECT_SHORT
    words = [NUMBERS.get(word, word) for word in text.lower().split()]
    return " ".join(short.get(word, word) for word in words if word not in ARTICLES)


def vqa_normalised(text: str, *, published: bool) -> str:
    """As VQA's evaluators normalise an answer."""
    return simple_words(without_marks(text, published=published), published=published)


def m4c_normalised(text: str, *, published: bool) -> str:
    """As TextVQA's evaluator normalises an answer: prediction and references alike."""
    text = text.lower().replace(",", "").replace("?", "").replace("'s", " 's")
    return vqa_normalised(_tidy(text), published=published)


def _tidy(text: str) -> str:
    return text.replace("\n", " ").replace("\t", " ").strip()


def leave_one_out(text: str, references: Sequence[str]) -> float:
    """The mean over the references of min(1, matches among the others / 3)."""
    matches = [reference == text for reference in references]
    total = sum(matches)
    return sum(min(1.0, (total - own) / ENOUGH) for own in matches) / len(references)


def _ten_references(question: Question) -> tuple[str, ...]:
    if len(question.answers) != REFERENCES:
        raise TaskDataError(
            f"question {question.id!r}: expected {REFERENCES} references, found {len(question.answers)}"
        )
    return question.answers


def _textvqa(question: Question, text: str, *, published: bool) -> float:
    normalised = partial(m4c_normalised, published=published)
    return leave_one_out(normalised(text), [normalised(answer) for answer in _ten_references(question)])


def _vqa(question: Question, text: str, *, published: bool) -> float:
    if not question.answers:
        raise TaskDataError(f"question {question.id!r}: expected references, found none")
    references = [_tidy(answer) for answer in question.answers]
    if not published:
        references = [vqa_normalised(_tidy(answer), published=False) for answer in _ten_references(question)]
    elif len(set(references)) > 1:
        references = [without_marks(answer, published=True) for answer in references]
    return leave_one_out(vqa_normalised(_tidy(text), published=published), references)


def _rounded(scorer: Scorer) -> Scorer:
    def score(*given: Sequence[object]) -> Score:
        found = scorer(*given)  # type: ignore[arg-type]
        return Score({name: round(value, 2) for name, value in found.metrics.items()}, found.questions, found.counted)

    return score


def _top_label(question: Question, text: str, *, published: bool) -> float:
    labels = {str(answer): float(value) for answer, value in question.row.get("label", {}).items()}
    if published:
        return labels.get(text, 0.0)
    wanted = m4c_normalised(text, published=False)
    return max(
        (value for answer, value in labels.items() if m4c_normalised(answer, published=False) == wanted), default=0.0
    )


def _rule(
    judge: Callable[..., float], slips: tuple[str, ...], differences: tuple[str, ...], *, rounds: bool = False
) -> Rule:
    published = over_predictions(partial(judge, published=True))
    return Rule(
        _rounded(published) if rounds else published,
        over_questions(partial(judge, published=False)),
        slips,
        differences,
    )


_EVERY = "every question counts once: one without a prediction scores 0"
TEXT_VQA = _rule(
    _textvqa,
    (
        "m4c_evaluator: re.UNICODE is passed as the number of replacements, so only the first 32 periods go",
        'the look-behind is mistyped and does nothing: "3." and "5.x" lose the point, "3.5" keeps it',
        "keys of contractions with capitals never fire, and somebody'd loses its apostrophe",
        "exactly ten references are asserted",
    ),
    ("every period goes unless a digit follows", "im, ive and somebodyd become I'm, I've and somebody'd", _EVERY),
)
VQA_V2 = _rule(
    _vqa,
    (
        "VQACL evaluate_raw: references are normalised only if they differ, and then their punctuation alone: with "
        'ten times "zero", "the beach" or "t-shirt" that very answer scores 0, and "two" never matches "2"',
        "the references are changed in place: a second call sees others (not reproduced)",
        "the periods of m4c_evaluator",
        "the result is rounded to two decimals before it enters the matrix",
    ),
    ("references are normalised as predictions are", "exactly ten references", _EVERY),
    rounds=True,
)
VQA_LABELS = _rule(
    _top_label,
    ("VQACL evaluate: a look-up of the raw text among the soft labels",),
    ("the text and the labels are normalised", _EVERY),
)
