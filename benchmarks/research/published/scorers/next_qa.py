"""NExT-QA's open answers: WUPS at threshold 0, from Wu and Palmer's similarity of words in WordNet.

A question's row has `type`; its `answers` are the gold answer and the additional references, if there are any.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache, partial

from inducekv_vllm.errors import ConfigError

from .scored import Question, Rule, over_answered, over_questions
from .vqa_text import vqa_normalised

Similarity = Callable[[str, str], float]  # of two words, 0 to 1
EXACT_TYPES = frozenset({"DC", "DB"})  # counting, yes or no
PUBLISHED_EXACT_TYPES = frozenset({"CC", "CB"})  # which NExT-QA has not


@cache
def wordnet_similarity(a: str, b: str) -> float:
    """1 if they are equal, otherwise that of the first sense of each; 0 for words that WordNet has not.

    Raises ConfigError: nltk or its copy of WordNet is missing.
    """
    if a == b:
        return 1.0
    try:
        from nltk.corpus import wordnet

        first, second = wordnet.synsets(a), wordnet.synsets(b)
    except (ImportError, LookupError) as error:
        raise ConfigError(
            "NExT-QA's scorer needs nltk and its WordNet: `pip install nltk`, then `python -m nltk.downloader wordnet`"
        ) from error
    if not first or not second:
        return 0.0
    return float(first[0].wup_similarity(second[0]) or 0.0)


def wups(found: Sequence[str], gold: Sequence[str], similarity: Similarity, *, skips_zero: bool) -> float:
    """The smaller of both directions' products over words of the best similarity; 0 for an empty text.

    Args:
        skips_zero: words without any similar word are left out of the product, instead of making it 0.
    """
    if not found or not gold:
        return 0.0

    def direction(words: Sequence[str], others: Sequence[str]) -> float:
        best = [max(similarity(word, other) for other in others) for word in words]
        return math.prod(value for value in best if value > 0 or not skips_zero)

    return min(direction(found, gold), direction(gold, found))


def _simple(text: str, *, published: bool) -> str:
    return vqa_normalised(text.strip(), published=published)


def _published(question: Question, text: str, *, similarity: Similarity) -> float:
    found, gold = _simple(text, published=True), question.answers[0]  # other references are never found
    if question.row.get("type") in PUBLISHED_EXACT_TYPES:
        return float(found == gold)
    return wups(found.split(), gold.lower().split(), similarity, skips_zero=True)


def _corrected(question: Question, text: str, *, similarity: Similarity) -> float:
    found, gold = _simple(text, published=False), [_simple(each, published=False) for each in question.answers]
    if question.row.get("type") in EXACT_TYPES:
        return float(found in gold)
    return max(wups(found.split(), each.split(), similarity, skips_zero=False) for each in gold)


def _in_wordnet(a: str, b: str) -> float:
    return wordnet_similarity(a, b)


def next_qa(similarity: Similarity = _in_wordnet) -> Rule:
    return Rule(
        over_answered(partial(_published, similarity=similarity), "wups"),
        over_questions(partial(_corrected, similarity=similarity), "wups"),
        (
            "VQACL NExT: exact match is meant for the types CC and CB, which do not exist: counting and yes or no get "
            "the similarity of words",
            "additional references are never found: pandas reads the video as a number, the file has texts",
            'the prediction is normalised and the gold answer is not: "two" becomes "2" and differs from "two"',
            "words without a similar word are left out of the product, instead of making it 0",
            "no lemmatisation, no stop words removed, as NExT-QA's own evaluator does (not corrected here)",
        ),
        (
            "DC and DB need the right answer",
            "the best of all references counts, normalised as the prediction is",
            "a word without a similar word makes the product 0",
        ),
    )
