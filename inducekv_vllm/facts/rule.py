"""Whether a request asks a stored question: how much of the stored one it says, and what it says beyond that.

A stored question is asked if, in the sentences of the request that say most of it,

- all of its names are said, with one typing error at most, and no other name stands beside them;
- numbers and symbols are the same;
- nothing belongs to a name in one of them alone, and nobody to anything (Anna's house is not Anna, the head's wife not
  the head);
- more than half of its weight is said, and not names alone; at most a third of the request's is something else;
- not both have said something of their own: that is another thing in its place (Lyon for Berlin, sick for vacation);
- no word that makes another question is in one of them alone (next, not, former);
- both ask for the same (who, when, where, why, how many).

Words say the same if they have a stem in common, stand in one line of the language's list or are related by WordNet.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from .language import Language
from .question import NAME_WEIGHT, Question, Sentence, Term

SAID: Final = 0.51  # of the stored question's weight, at least
UNNAMED: Final = 0.3  # of its weight without names, at least
MORE: Final = 0.34  # of the request's weight, at most
BOTH: Final = 0.1  # of the weight without names, on both sides
NAMED: Final = 0.9  # of what tells a question's fact from others
FEW_WORDS: Final = 3
ASKING: Final = ("who", "when", "where", "count")  # kinds that say what is asked for
BESIDE: Final = 2  # words between two that belong together, and one
MOST_SENTENCES: Final = 4  # of a request that are read together
Replaced = dict[str, str]  # words of a request with typing errors: the stored words that they stand for


@dataclass(frozen=True)
class Comparison:
    """A stored question beside a request."""

    said: float  # share of the stored question's weight
    more: float  # share of the request's weight
    missing: tuple[str, ...]  # words of the stored question that the request does not say
    added: tuple[str, ...]  # words of the request that the stored question does not say
    differs: str | None  # why the request does not ask it; None: it does

    @property
    def is_asked(self) -> bool:
        return self.differs is None

    @property
    def closeness(self) -> float:
        """From 0 to 1: what both say, of what either says."""
        return self.said * (1 - self.more)


SAME: Final = Comparison(1.0, 0.0, (), (), None)


def compare(stored: Question, asked: Question, language: Language, replaced: Replaced) -> Comparison:
    """The best that any run of the request's sentences gives."""
    wanted = stored.terms
    matched = [_matched(wanted, sentence, language, replaced) for sentence in asked.sentences]
    best: Comparison | None = None
    for first, last in _runs([bool(each) for each in matched]):
        found = _of_run(stored, wanted, asked, range(first, last + 1), matched, language)
        if best is None or (found.differs is None, found.closeness) > (best.differs is None, best.closeness):
            best = found
    return best or Comparison(0.0, 1.0, tuple(term.word for term in wanted.values()), (), "it says nothing of it")


def compare_names(
    stored: Question, asked: Question, language: Language, replaced: Replaced, num_facts: Callable[[str], int]
) -> Comparison:
    """Whether a request is about what a stored question is about, when it is known that it asks the same of it.

    Its names and numbers must be said, and nearly all of its weight, where a word that occurs with n facts counts
    1 / n^2: with one fact, it says which is meant; with many, it belongs to a wording.

    Args:
        num_facts: n of a term's key.
    """
    wanted, run = stored.terms, range(len(asked.sentences))
    matched = [_matched(wanted, sentence, language, replaced) for sentence in asked.sentences]
    shared = _shared(wanted, asked, run, matched)
    weights = {key: max(num_facts(key), 1) ** -2.0 for key in wanted}
    share = sum(weight for key, weight in weights.items() if key in shared.said) / (sum(weights.values()) or 1.0)
    differs = (
        _first("it does not name", [term for term in shared.missing if term.is_name or term.is_exact])
        or _first("it names", _beside(run, asked, shared.of_names, shared.added))
        or ("it says too little of it" if share < NAMED else None)
    )
    return Comparison(share, 0.0, _words(shared.missing), _words(shared.added), differs)


def _runs(has_words: Sequence[bool]) -> Iterator[tuple[int, int]]:
    """First and last of sentences that belong together: both say something of the stored question."""
    places = [at for at, has in enumerate(has_words) if has]
    for at, first in enumerate(places):
        yield from ((first, last) for last in places[at:] if last - first < MOST_SENTENCES)


def _matched(wanted: Sentence, sentence: Sentence, language: Language, replaced: Replaced) -> dict[str, set[str]]:
    """The terms of a stored question that a sentence says, each with those of the sentence that say it."""
    by_word: dict[str, set[str]] = {}
    by_sense: dict[int, set[str]] = {}
    for key, term in sentence.items():
        near = replaced.get(term.word, term.word)
        for word in {term.word, term.stem, near, language.stem(near)}:
            by_word.setdefault(word, set()).add(key)
        for sense in term.senses:
            by_sense.setdefault(sense, set()).add(key)
    found: dict[str, set[str]] = {}
    for key, term in wanted.items():
        said = (
            by_word.get(term.word, set()) if term.is_exact else by_word.get(term.stem) or by_word.get(term.word, set())
        )
        if not said and not term.is_name and not term.is_exact:
            said = set[str]().union(*(by_sense.get(sense, ()) for sense in term.senses))
            said |= {near for near in language.related(term.stem) & sentence.keys() if not sentence[near].is_name}
        if said:
            found[key] = said
    return found


@dataclass(frozen=True)
class _Shared:
    """What a run of a request's sentences and a stored question say both, and each alone."""

    said: set[str]  # keys of the stored question's terms
    used: set[str]  # keys of the request's terms that say them
    of_names: set[str]  # those that say names
    terms: list[Term]  # of the run
    missing: list[Term]  # of the stored question alone, without function words
    added: list[Term]  # of the request alone, without function words


def _shared(wanted: Sentence, asked: Question, run: range, matched: Sequence[dict[str, set[str]]]) -> _Shared:
    terms = [term for at in run for term in asked.sentences[at].values()]
    pairs = [(name, key) for at in run for name, keys in matched[at].items() for key in keys]
    said, used = {name for name, _ in pairs}, {key for _, key in pairs}
    return _Shared(
        said,
        used,
        {key for name, key in pairs if wanted[name].is_name},
        terms,
        [term for key, term in wanted.items() if key not in said and not term.is_function],
        [term for term in terms if term.key not in used and not term.is_function],
    )


def _of_run(
    stored: Question,
    wanted: Sentence,
    asked: Question,
    run: range,
    matched: Sequence[dict[str, set[str]]],
    language: Language,
) -> Comparison:
    shared = _shared(wanted, asked, run, matched)
    terms, used, of_names = shared.terms, shared.used, shared.of_names
    missing = [term for term in shared.missing if not term.senses & asked.asks_in]
    added = [term for term in shared.added if not term.senses & stored.asks_in]
    total = sum(term.weight for term in wanted.values()) or 1.0
    asked_total = sum(term.weight for term in terms if term.key in used or not term.is_function) or 1.0
    lacks, more = _weight(missing), _weight(added)
    unnamed = _weight([term for term in wanted.values() if not term.is_name]) or 1.0
    both = min(
        (lacks + _asks_alone(stored, asked, terms)) / unnamed,
        (more + _asks_alone(asked, stored, wanted.values()))
        / (_weight([term for term in terms if term.key not in of_names]) or 1.0),
    )
    whole = range(len(stored.sentences))
    is_all = not missing and not added
    is_of_people = not added and any(term.stem in language.people for term in terms if term.key in used - of_names)
    differs = (
        _first("it does not name", [term for term in missing if term.is_name])
        or _first("it names", _beside(run, asked, of_names, added))
        or _numbers(wanted, terms)
        or _first("it asks about", _belonging(asked, run, used, added, language))
        or _first("it says", [term for term in added if term.stem in language.contrasting])
        or _first("it does not say", [term for term in missing if term.stem in language.contrasting])
        or _asks_another(stored.asks, asked.asks, is_all, is_of_people)
        or _first("it does not name", _torn(run, wanted, asked, matched))
        or ("it says too little of it" if 1 - lacks / total < SAID else None)
        or (_first("it does not say", missing) if _is_short(wanted) else None)
        or ("it says nothing of it but names" if 1 - lacks / unnamed < UNNAMED else None)
        or ("it says more than that" if more / asked_total > MORE else None)
        or ("it says something else in its place" if both > BOTH else None)
        or _first("it does not ask about", _belonging(stored, whole, shared.said, missing, language))
        or ("it turns it round" if _is_turned(stored, asked) else None)
    )
    return Comparison(1 - lacks / total, more / asked_total, _words(missing), _words(added), differs)


def _asks_alone(question: Question, other: Question, terms: Iterable[Term]) -> float:
    """The weight of what a question asks for, if the other neither asks for it nor says it: when, and the date of."""
    if question.asks not in ASKING or question.asks == other.asks:
        return 0.0
    return 0.0 if any(term.senses & question.asks_in for term in terms) else NAME_WEIGHT


def _is_short(wanted: Sentence) -> bool:
    """Whether a question names nothing and has few words, so that each of them counts."""
    return not any(term.is_name for term in wanted.values()) and len(wanted) <= FEW_WORDS


def _words(terms: Sequence[Term]) -> tuple[str, ...]:
    return tuple(term.word for term in terms)


def _weight(terms: Sequence[Term]) -> float:
    return sum(term.weight for term in terms)


def _first(reason: str, terms: Sequence[Term]) -> str | None:
    return f"{reason} {terms[0].word!r}" if terms else None


def _beside(run: range, asked: Question, of_names: set[str], added: Sequence[Term]) -> list[Term]:
    """Names of the request that belong to a name which both say, or follow it, and are not stored with it.

    Hayes belongs to Helen; whoever asks about Oslo and Lyon asks two questions.
    """
    found = list[Term]()
    for at in run:
        sentence = asked.sentences[at]
        places = [place for key, term in sentence.items() if key in of_names for place in term.places]
        own = [term for term in added if (term.is_name or term.is_bound) and sentence.get(term.key) is term]
        found += [term for term in own if any(a >= b - BESIDE for a in term.places for b in places)]
    return found


def _belonging(
    question: Question, run: range, said: Collection[str], alone: Sequence[Term], language: Language
) -> list[Term]:
    """What belongs to something that both questions say, if one alone says it: Anna's brother is not Anna.

    What belongs to a name counts, and people of anybody: the cause of death is why one died.

    Args:
        said: keys of the question's terms.
        alone: its terms that the other does not say.
    """
    keys = {term.key for term in alone}
    found = list[Term]()
    for at in run:
        placed = {place: term for term in question.sentences[at].values() for place in term.places}
        for owned in question.owned[at]:
            what = [placed[place] for place in owned.what if place in placed]
            owner = [placed[place] for place in owned.owner if place in placed]
            counts = any(term.stem in language.people for term in what)
            if all(term.key in keys for term in what) and any(
                term.key in said and (term.is_name or counts) for term in owner
            ):
                found += what
    return found


def _torn(run: range, wanted: Sentence, asked: Question, matched: Sequence[dict[str, set[str]]]) -> list[Term]:
    """Names of words that anybody says, as The Who, if the request does not say them beside each other."""
    names = sorted((place, key) for key, term in wanted.items() if term.is_name for place in term.places)
    for (place, key), (next_place, next_key) in pairwise(names):
        if next_place != place + 1 or not (wanted[key].is_common or wanted[next_key].is_common):
            continue
        if not any(_are_beside(asked.sentences[at], matched[at], key, next_key) for at in run):
            return [wanted[key]]
    return []


def _are_beside(sentence: Sentence, matched: dict[str, set[str]], first: str, second: str) -> bool:
    of_first, of_second = (
        {place for key in matched.get(name, ()) for place in sentence[key].places} for name in (first, second)
    )
    return any(place + 1 in of_second for place in of_first)


def _numbers(wanted: Sentence, terms: Sequence[Term]) -> str | None:
    """Numbers must be the same; a symbol that is stored must be there."""
    stored = {term.word for term in wanted.values() if term.is_exact}
    asked = {term.word for term in terms if term.is_exact}
    numbers = {word for word in asked - stored if word[-1].isdigit()}
    different = [*sorted(stored - asked), *sorted(numbers)]
    return f"{different[0]!r} is in one of them alone" if different else None


def _asks_another(stored: str | None, asked: str | None, is_all: bool, is_of_people: bool) -> str | None:
    """That one answer can not be right for both.

    "What" may ask for all but reasons and truth, for people if a word for one is said and nothing added, and for people
    and ways if all else is equal.
    """
    kinds = {stored, asked}
    if "what" in kinds:
        alike = kinds.isdisjoint({"why", "whether", "may"})
        alike = alike and (is_all or kinds.isdisjoint({"who", "how"}) or ("who" in kinds and is_of_people))
    else:
        alike = kinds <= {"may", "whether"} or kinds == {"may", "how"}
    return None if alike or None in kinds or len(kinds) == 1 else f"it asks {asked}, not {stored}"


def _is_turned(stored: Question, asked: Question) -> bool:
    """Whether something else follows a directing word: EUR to USD, and USD to EUR."""
    wanted, said = stored.terms, asked.terms
    theirs, ours = set(stored.directed), set(asked.directed)
    instead = {word for word, what in ours - theirs if what in wanted}
    return any(word in instead and what in said for word, what in theirs - ours)
