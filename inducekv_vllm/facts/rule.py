"""A stored question beside a request: whether they are one question, or surely two.

They are one if what makes a question is equal (`question.key_of`). They are two if

- numbers, symbols or quoted words differ;
- one asks who does it, the other to whom it is done;
- one of them is negated, or has the opposite of a word of the other (legal, illegal) or its past (lead, led);
- they ask for something of another kind (who, where), or one of them alone has a condition;
- the request does not say a name of the stored question, or has another one;
- their other words are the same, and a word that makes another question is in one of them alone (who, was, out, only).

Of all others nothing is known by words: `judge.py`.
"""

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from typing import Final

from rapidfuzz.distance import OSA

from .language import Language
from .question import Question, Term

FEW: Final = 2  # words that only one of two says, where the others are the same
SPELLED: Final = 5  # letters of a name that may have a typing error
NAMED: Final = 0.9  # of what tells a question's fact from others


@dataclass(frozen=True)
class Comparison:
    """A stored question beside a request."""

    is_same: bool
    said: float  # share of the stored question's weight
    more: float  # share of the request's weight
    missing: tuple[str, ...]  # words of the stored question that the request does not say
    added: tuple[str, ...]  # words of the request that the stored question does not say
    differs: str | None  # why the request surely asks something else

    @property
    def closeness(self) -> float:
        """From 0 to 1: what both say, of what either says."""
        return self.said * (1 - self.more)


SAME: Final = Comparison(True, 1.0, 0.0, (), (), None)


def compare(stored: Question, asked: Question, language: Language) -> Comparison:
    """See the module docstring."""
    if stored.key == asked.key:
        return SAME
    missing, added = _alone(stored, asked), _alone(asked, stored)
    differs = (
        _first("{!r} is in one of them alone", _exact(missing, added))
        or _first("{!r} is quoted in one of them alone", sorted(stored.quoted ^ asked.quoted))
        or ("one of them is negated" if _is_turned(stored, asked, missing, added) else None)
        or ("it asks for the other side" if {stored.asks_for, asked.asks_for} == {"subject", "object"} else None)
        or _first("it asks the opposite: {!r}", _opposite(missing, added, language))
        or _first("it asks of another time: {!r}", _past(missing, added, language))
        or _first("{!r} makes a condition in one of them alone", _condition(stored, asked, missing, added))
        or _first("it does not name {!r}", _names(missing))
        or _first("it names {!r}", _names(added))
        or _first(
            "the same words, but {!r} makes another question of one of them",
            _telling(stored, asked, missing, added, language),
        )
        or ("they ask for something of another kind" if _are_apart(stored.kinds, asked.kinds) else None)
    )
    return _comparison(stored, asked, missing, added, differs)


def compare_names(stored: Question, asked: Question, num_facts: Callable[[str], int]) -> Comparison:
    """Whether a request is about what a stored question is about, when it is known that it asks the same of it.

    Its names and numbers must be said, and nearly all of its weight, where a word that occurs with n facts counts
    1 / n^2: with one fact, it says which is meant; with many, it belongs to a wording.

    Args:
        num_facts: n of a term's key.
    """
    missing, added = _alone(stored, asked), _alone(asked, stored)
    weights = {key: max(num_facts(key), 1) ** -2.0 for key in stored.terms}
    lacks = {term.key for term in missing}
    share = sum(weight for key, weight in weights.items() if key not in lacks) / (sum(weights.values()) or 1.0)
    named = [term.word for term in missing if term.is_name or term.is_exact]
    differs = _first("it does not name {!r}", named)
    if differs is None and share < NAMED:
        differs = "it says too little of what it is about"
    return replace(_comparison(stored, asked, missing, added, differs), is_same=differs is None, said=share)


def _comparison(
    stored: Question, asked: Question, missing: list[Term], added: list[Term], differs: str | None
) -> Comparison:
    lacks, more = _weight(missing), _weight(added)
    return Comparison(
        False,
        1 - lacks / (_weight(stored.terms.values()) or 1.0),
        more / (_weight(asked.terms.values()) or 1.0),
        tuple(term.word for term in missing),
        tuple(term.word for term in added),
        differs,
    )


def _alone(one: Question, other: Question) -> list[Term]:
    """The terms of one that the other does not say, not even with a typing error."""
    return [term for term in one.terms.values() if term.key not in other.terms and not _misspelled(term, other)]


def _misspelled(term: Term, other: Question) -> bool:
    return (
        len(term.word) >= SPELLED
        and term.word.isalpha()
        and any(
            not (term.is_name and each.is_name)  # of names, one letter tells two: La Bella and La Belle
            and each.word[0] == term.word[0]
            and abs(len(each.word) - len(term.word)) <= 1
            and OSA.distance(each.word, term.word, score_cutoff=1) <= 1
            for each in other.terms.values()
        )
    )


def _exact(missing: list[Term], added: list[Term]) -> list[str]:
    return [term.word for term in (*missing, *added) if term.is_exact]


def _opposite(missing: list[Term], added: list[Term], language: Language) -> Iterator[str]:
    for one, other in ((missing, added), (added, missing)):
        longer = {term.word for term in one}
        yield from (term.word for term in other for start in language.opposite if start + term.word in longer)


def _past(missing: list[Term], added: list[Term], language: Language) -> Iterator[str]:
    for one, other in ((missing, added), (added, missing)):
        stems = {term.stem for term in other}
        yield from (term.word for term in one if language.past.get(term.word) in stems)


def _are_apart(one: frozenset[int], other: frozenset[int]) -> bool:
    return bool(one) and bool(other) and one.isdisjoint(other)


def _condition(stored: Question, asked: Question, missing: list[Term], added: list[Term]) -> list[str]:
    """Where one of them says what the other says, and more."""
    return [] if missing and added else sorted(stored.conditions ^ asked.conditions)


def _names(terms: list[Term]) -> list[str]:
    return [term.word for term in terms if term.is_name]


def _is_turned(stored: Question, asked: Question, missing: list[Term], added: list[Term]) -> bool:
    """Whether all that both say but a word or two is negated in one of them."""
    return stored.is_negated != asked.is_negated and len(missing) + len(added) <= FEW


def _telling(
    stored: Question, asked: Question, missing: list[Term], added: list[Term], language: Language
) -> list[str]:
    """Words that make another question; of particles one in place of another, as the policy on returns is theirs."""
    ours, theirs = asked.telling - stored.telling, stored.telling - asked.telling
    if missing or added:
        return []
    in_place = ours | theirs if ours & language.particles and theirs & language.particles else frozenset()
    if _are_apart(stored.tenses, asked.tenses):
        in_place |= {"tense"}
    return sorted((ours | theirs) - language.particles) or sorted(in_place)


def _weight(terms: Collection[Term]) -> float:
    return sum(term.weight for term in terms)


def _first(reason: str, words: Collection[str] | Iterator[str]) -> str | None:
    word = next(iter(words), None)
    return None if word is None else reason.format(word)
