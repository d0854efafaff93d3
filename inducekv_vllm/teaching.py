"""Facts added to a bundle, corrected and forgotten: the next version of it, without training."""

from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from operator import attrgetter
from typing import Any, Final, Literal

from pydantic import ValidationError

from .backbone.fact_reader import FactReader
from .bundle import Bundle, FactRecord, PictureRecord, bundle_without_entries
from .bundle.metadata import MAX_ID, first_problem
from .bundle.plain_text import found_beside_text
from .bundle.source import source_digest_of
from .errors import BundleError, CapacityError, TaskDataError, UnknownFact
from .facts import MOST_CHARACTERS, has_words
from .facts.index import kept_of, key_of_stored
from .facts.question import Key

DEFAULT_TASK: Final = "facts"
DEFAULT_BUDGET_BYTES: Final = 64 * 2**20
RECIPE: Final = "teach"
ROUTE: Final = "/examples/"  # stands between a bundle's name and a fact's id in paths of HTTP
WhenFull = Literal["forget", "refuse"]


def fact_of(
    question: str,
    answer: str,
    task: str = DEFAULT_TASK,
    id: str | None = None,
    expires_at: datetime | None = None,
    picture: PictureRecord | None = None,
    also: Sequence[str] = (),
) -> FactRecord:
    """A new fact. Without an id it gets one that follows from its question and task.

    Args:
        also: other wordings of the question, of at most 100 bytes each.
        picture: the question's pictures; None without any.

    Raises:
        TaskDataError: an id, task, question, answer or wording is empty or has something else than text in it, an id or
            a wording is too long, or there are too many wordings.
    """
    texts = {"id": id or "", "task": task, "question": question, "answer": answer, "wordings": "\n".join(also)}
    for what, text in texts.items():
        if (found := found_beside_text(text)) is not None:
            raise TaskDataError(f"example {id or question!r:.100}: {what}: expected text alone, found {found}")
    pictures = [] if picture is None else [picture.digest.encode()]
    digest = source_digest_of([{"role": "user", "content": [{"type": "text", "text": question}]}], pictures)
    try:
        return FactRecord(
            id=f"{task}/{digest[:16]}"[-MAX_ID:] if id is None else id,
            task=task,
            source_digest=digest,
            created_at=datetime.now(UTC).replace(microsecond=0),
            expires_at=expires_at,
            question=question,
            answer=answer,
            picture=picture,
            also=tuple(also),
        )
    except ValidationError as error:
        raise TaskDataError(f"example {id or question!r:.100}: {first_problem(error)}") from error


@dataclass(frozen=True)
class Report:
    """What has become of a bundle's facts."""

    ids: tuple[str, ...]  # those that were taught, corrected or forgotten
    facts: int  # that the bundle has now
    corrected: tuple[str, ...] = ()  # of `ids`, those that asked or answered something else before
    dropped: tuple[str, ...] = ()  # earlier ones that had to go, in a full bundle
    replaced: tuple[str, ...] = ()  # those that do not count any more: one of `ids` has the same question
    returned: tuple[str, ...] = ()  # those that count again: the one in their place was forgotten


@dataclass(frozen=True)
class Taught:
    """The next version of a bundle."""

    bundle: Bundle
    report: Report


def taught(
    before: Bundle | None,
    facts: Sequence[FactRecord],
    reader: FactReader,
    budget_bytes: int | None = None,
    *,
    when_full: WhenFull = "forget",
    last_used: Mapping[str, float] | None = None,
) -> Taught:
    """The next version of a bundle, with more facts; the first one, of facts alone, if there is none yet.

    A fact whose id the bundle has already takes the other's place, as the newest one.

    Args:
        facts: at least one.
        budget_bytes: of tensors and facts; None for that of the version before, or `DEFAULT_BUDGET_BYTES`.
        when_full: "forget" the earlier facts that were used or taught longest ago, as many as have to go; or "refuse".
        last_used: by id of a fact, when it last answered, in seconds since the epoch.

    Raises:
        TaskDataError: a fact has a question or a wording without words, a question that is longer than what is read of
            a request, or a wording that another fact's question has; an answer that is blank, or longer than the
            model's context; a chat template's marks in any of them; an id that occurs twice, or that a route could not
            name; or it has expired.
        BundleError: an id is an entry's.
        CapacityError: they take more bytes, and none may be forgotten or too few can.
    """
    new = {fact.id: fact for fact in facts}
    earlier = before.metadata.facts if before is not None else ()
    others = [fact for fact in earlier if fact.id not in new]
    _check(facts, others, reader)
    settings = before.metadata.settings if before is not None else {}
    budget = budget_bytes or settings.get("budget_bytes", DEFAULT_BUDGET_BYTES)
    used, kept = stored_bytes(before, [*others, *facts]), others
    if used > budget and when_full == "forget":
        kept, used = _lately_used(others, used, budget, last_used or {})
    if used > budget:
        raise CapacityError(
            f"with {len(facts)} more facts the bundle has {used} bytes, and its budget is {budget}: forget some of its "
            f"{len(kept)} facts, or give a larger budget_bytes"
        )
    settings, now = {**settings, "budget_bytes": budget}, (*kept, *facts)
    if before is None:
        bundle = bundle_without_entries(reader.model, recipe=RECIPE, facts=now, settings=settings)
    else:
        bundle = _with_facts(before, now, settings)
    left = {fact.id for fact in kept}
    report = Report(
        ids=tuple(new),
        facts=len(now),
        corrected=tuple(old.id for old in earlier if old.id in new and not _says_the_same(old, new[old.id])),
        dropped=tuple(fact.id for fact in others if fact.id not in left),
        replaced=tuple(old for old, newer in replaced_by(now).items() if newer in new),
    )
    return Taught(bundle, report)


def forgotten(before: Bundle, ids: Collection[str]) -> Taught:
    """The next version of a bundle, without some of its facts.

    Raises:
        UnknownFact: it has no such fact.
        BundleError: nothing would be left of it.
    """
    facts = before.metadata.facts
    if missing := sorted(set(ids) - {fact.id for fact in facts}):
        raise UnknownFact(f"the bundle has no fact {missing[0]!r}")
    kept = tuple(fact for fact in facts if fact.id not in ids)
    if not kept and not before.num_entries and not before.metadata.task_adapters:
        raise BundleError(f"all {len(facts)} facts would be forgotten, and a bundle needs one: unload it instead")
    still = replaced_by(kept)
    returned = tuple(old for old, newer in replaced_by(facts).items() if newer in ids and old not in {*ids, *still})
    return Taught(_with_facts(before, kept, before.metadata.settings), Report(tuple(ids), len(kept), returned=returned))


def _lately_used(
    facts: Sequence[FactRecord], used: int, budget: int, last_used: Mapping[str, float]
) -> tuple[list[FactRecord], int]:
    """Without those that were used or taught longest ago, as many as have to go; and the bytes that are used then."""

    def last(fact: FactRecord) -> float:
        return max(last_used.get(fact.id, 0.0), fact.created_at.timestamp() if fact.created_at is not None else 0.0)

    gone = set[str]()
    for fact in sorted(facts, key=last):  # of equals, the one taught first
        if used <= budget:
            break
        gone.add(fact.id)
        used -= _bytes_of(fact)
    return [fact for fact in facts if fact.id not in gone], used


def stored_bytes(bundle: Bundle | None, facts: Sequence[FactRecord]) -> int:
    """What a bundle's tensors, if there is one, and these facts take in a file."""
    tensors = bundle.tensors().values() if bundle is not None else ()
    return sum(tensor.nbytes for tensor in tensors) + sum(_bytes_of(fact) for fact in facts)


def _bytes_of(fact: FactRecord) -> int:
    return len(fact.model_dump_json().encode())


def _check(facts: Sequence[FactRecord], earlier: Sequence[FactRecord], reader: FactReader) -> None:
    seen, now = set[str](), datetime.now(UTC)
    for fact in facts:
        if fact.id in seen:
            raise TaskDataError(f"example {fact.id!r} occurs more than once")
        seen.add(fact.id)
        if "\n" in fact.id:
            raise TaskDataError(f"example {fact.id!r}: an id cannot have a line break, which no path has")
        if ROUTE in f"/{fact.id}":
            raise TaskDataError(
                f"example {fact.id!r}: an id cannot have {ROUTE!r} in it or begin with {ROUTE[1:]!r}, which routes have"
            )
        if fact.has_expired(now):
            raise TaskDataError(f"example {fact.id!r}: it has expired at {fact.expires_at}")
        _check_texts(fact, reader)
        if fact.picture is not None and not reader.placeholders:
            raise TaskDataError(f"example {fact.id!r}: its question has a picture, and the model takes text alone")
    _check_wordings([*earlier, *facts])


def _check_texts(fact: FactRecord, reader: FactReader) -> None:
    for text in (fact.question, *fact.also):
        if not has_words(text):
            raise TaskDataError(f"example {fact.id!r}: expected a question with words, found {text!r:.100}")
        if len(text) > MOST_CHARACTERS:
            raise TaskDataError(
                f"example {fact.id!r}: its question has {len(text)} characters, expected at most {MOST_CHARACTERS}"
            )
    if not fact.answer.strip():
        raise TaskDataError(f"example {fact.id!r}: expected an answer, found {fact.answer!r:.100}")
    for text in (fact.question, fact.answer, *fact.also):
        if (mark := reader.mark_in(text)) is not None:
            raise TaskDataError(f"example {fact.id!r}: {text!r:.100} has {mark!r}, which marks turns of a conversation")
    for text in (fact.question, *fact.also):
        if fact.picture is None and kept_of(text).needs_context:
            raise TaskDataError(
                f"example {fact.id!r}: {text!r:.100} stands on what was said before it, and would be answered in any "
                'conversation: write what it is about, such as "How old is Ana Ruiz?" for "How old is she?"'
            )
    length = len(reader.answer(fact.answer))
    if reader.context is not None and length >= reader.context:
        raise TaskDataError(
            f"example {fact.id!r}: its answer has {length} tokens, the model's context holds {reader.context}"
        )


def _check_wordings(facts: Sequence[FactRecord]) -> None:
    """A wording asks for one fact."""
    asked = {_asked(fact, fact.question): fact.id for fact in facts}  # of equal questions the newest counts
    for fact in facts:
        for wording in fact.also:
            other = asked.setdefault(_asked(fact, wording), fact.id)
            if other != fact.id:
                raise TaskDataError(f"example {fact.id!r}: its wording {wording!r} asks for example {other!r}")


def _asked(fact: FactRecord, question: str) -> tuple[str, Key, str | None]:
    """Questions with the same are one question, when they are taught as when they are asked."""
    return fact.task, key_of_stored(question), fact.shown


def _says_the_same(old: FactRecord, new: FactRecord) -> bool:
    return (old.question, old.answer) == (new.question, new.answer)


def _with_facts(before: Bundle, facts: Sequence[FactRecord], settings: dict[str, Any]) -> Bundle:
    gate = before.gate_of(before.metadata.entries, facts)
    return before.next(facts=tuple(facts), settings=settings, gate=gate)


def replaced_by(facts: Sequence[FactRecord]) -> dict[str, str]:
    """The facts that do not count, because a newer one of the task has the same question: id to id."""
    asked = {fact.id: _asked(fact, fact.question) for fact in facts}
    newest = {question: id for id, question in asked.items()}
    return {id: newest[question] for id, question in asked.items() if newest[question] != id}


class FactList:
    """A version's facts in the order of their ids, page by page: one begins behind an id, there or not."""

    def __init__(self, facts: Sequence[FactRecord]) -> None:
        self._facts = sorted(facts, key=attrgetter("id"))
        self._replaced_by = replaced_by(facts)

    def page(self, after: str, limit: int) -> tuple[list[tuple[FactRecord, str | None]], bool]:
        """The next facts behind an id, each with the newer one that counts in its place; and whether there are more."""
        begin = bisect_right(self._facts, after, key=attrgetter("id"))
        shown = self._facts[begin : begin + limit]
        return [(fact, self._replaced_by.get(fact.id)) for fact in shown], begin + limit < len(self._facts)
