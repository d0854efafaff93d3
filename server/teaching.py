"""The routes that teach a bundle facts, list them, correct and forget them: no training, beside running requests."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Final

from fastapi import APIRouter, Depends, Path, Query, Request
from vllm.entrypoints.serve.utils.api_utils import validate_json_request

from inducekv_vllm.backbone.stored_facts import FactReader
from inducekv_vllm.bundle import Bundle, FactRecord
from inducekv_vllm.errors import InduceKVError, TaskDataError, UnknownFact
from inducekv_vllm.frontend.memory_engine import MemoryEngine
from inducekv_vllm.frontend.pictures import is_picture
from inducekv_vllm.teaching import dropped, fact_of, forgotten, replaced_by, taught, with_wordings

from .bodies import MemoryRoute
from .changes import Change
from .registry import ChangedFacts
from .requests import (
    CHANGE_ERRORS,
    NO_PATH,
    NOT_LOADED,
    TAG,
    TOO_LONG,
    Admin,
    KeyToSeeMore,
    access_of,
    errors,
    registry_of,
)
from .schemas import (
    CorrectExampleRequest,
    ExampleMessage,
    MemoryExample,
    MemoryExampleList,
    TaughtBundle,
    TaughtExample,
    TeachRequest,
)

Asked = tuple[str, str | None]  # a question's text, and what its pictures are like
PICTURES_AT_ONCE: Final = 8
PROPOSED_AT_ONCE: Final = 2  # questions: running requests are not to wait for them
router = APIRouter(tags=[TAG], route_class=MemoryRoute)
BAD_QUERY = errors(BAD_REQUEST="`limit` is no number from 1 to 10,000.")
Name = Annotated[str, Path(description="The name of a bundle.", examples=["guild"])]
ExampleId = Annotated[str, Path(description="The id of an example.", examples=["facts/9e1f0c5a3f6e8d7c"])]


@router.post(
    "/v1/memory_bundles/{name:path}/examples",
    summary="Teach a bundle facts",
    dependencies=[Depends(validate_json_request)],
    responses=CHANGE_ERRORS | TOO_LONG | NO_PATH,
)
async def teach(name: Name, body: TeachRequest, request: Request, admin: Admin) -> TaughtBundle:
    """Make the next version of the bundle, or its first one; it serves when the answer comes. Nothing is trained."""
    engine: MemoryEngine = request.app.state.inducekv_engine
    facts = await _facts(body.examples, engine)
    most = {fact.id: each.propose for fact, each in zip(facts, body.examples, strict=True) if each.propose is not None}
    proposed = await _proposed(facts, most, engine)
    registry = registry_of(request)
    last_used = await registry.journal.uses(name)

    def make(bundle: Bundle | None, reader: FactReader) -> Bundle:
        return taught(
            bundle,
            with_wordings(bundle, facts, reader, proposed, most),
            reader,
            body.budget_bytes,
            when_full=body.when_full,
            last_used=last_used,
        )

    changed = await registry.change_facts(Change.TEACH, name, make, expected_digest=body.expected_digest, who=admin)
    gone = dropped(changed.before, changed.after)
    answer = _answer(changed, [fact.id for fact in facts], gone)
    answer.proposed = {fact.id: list(fact.proposed) for fact in changed.after.metadata.facts if fact.id in most}
    return answer


@router.get(
    "/v1/memory_bundles/{name:path}/examples", summary="List the facts of a bundle", responses=NOT_LOADED | BAD_QUERY
)
async def examples(
    name: Name,
    request: Request,
    key: KeyToSeeMore = None,
    after: Annotated[str | None, Query(description="The id of the last example that was listed before.")] = None,
    limit: Annotated[int, Query(ge=1, le=10_000)] = 1000,
) -> MemoryExampleList:
    """In the order in which they were taught."""
    metadata = registry_of(request).metadata(name)
    is_admin, facts = access_of(request).is_admin(key), metadata.facts
    begin = 0
    if after is not None:
        places = {fact.id: place for place, fact in enumerate(facts)}
        if after not in places:
            raise UnknownFact(f"the bundle has no fact {after!r}")
        begin = places[after] + 1
    newer = replaced_by(facts)
    shown = [_shown(fact, newer.get(fact.id), is_admin) for fact in itertools.islice(facts, begin, begin + limit)]
    return MemoryExampleList(digest=metadata.digest, data=shown, has_more=begin + limit < len(facts))


@router.patch(
    "/v1/memory_bundles/{name:path}/examples/{example_id:path}",
    summary="Correct a fact",
    dependencies=[Depends(validate_json_request)],
    responses=CHANGE_ERRORS | NOT_LOADED | TOO_LONG,
)
async def correct(
    name: Name, example_id: ExampleId, body: CorrectExampleRequest, request: Request, admin: Admin
) -> TaughtBundle:
    """Give a fact another answer, question or date, or more wordings: it counts as the newest one then."""
    registry = registry_of(request)
    registry.metadata(name)
    asked = None
    if body.messages is not None:
        asked = await _asked(body.messages, example_id, request.app.state.inducekv_engine)
    make = partial(_corrected, example_id=example_id, asked=asked, body=body)
    changed = await registry.change_facts(Change.TEACH, name, make, expected_digest=body.expected_digest, who=admin)
    return _answer(changed, [example_id])


@router.delete(
    "/v1/memory_bundles/{name:path}/examples/{example_id:path}",
    summary="Forget a fact",
    responses=CHANGE_ERRORS | NOT_LOADED | TOO_LONG,
)
async def forget(
    name: Name, example_id: ExampleId, request: Request, admin: Admin, expected_digest: str | None = None
) -> TaughtBundle:
    """Versions before this one keep it for a rollback, until they are forgotten."""
    registry = registry_of(request)
    make = partial(_without, example_id=example_id)
    changed = await registry.change_facts(Change.FORGET_FACTS, name, make, expected_digest=expected_digest, who=admin)
    return _answer(changed, [example_id])


def _corrected(
    bundle: Bundle | None, reader: FactReader, *, example_id: str, asked: Asked | None, body: CorrectExampleRequest
) -> Bundle:
    known = {fact.id: fact for fact in bundle.metadata.facts} if bundle is not None else {}
    if example_id not in known:
        raise UnknownFact(f"the bundle has no fact {example_id!r}")
    old = known[example_id]
    question, picture = asked or (old.question, old.picture)
    expiry = body.expires_at or old.expires_at
    if stray := [wording for wording in body.without if wording not in old.also]:
        raise TaskDataError(f"example {example_id!r} has no wording {stray[0]!r}")
    # Those that the model has proposed are of the question that it was asked about.
    gone = {*body.without, *(old.proposed if asked is not None else ())}
    added = body.also or []
    also = list(dict.fromkeys([*(wording for wording in old.also if wording not in gone), *added]))
    new = fact_of(question, body.answer or old.answer, old.task, example_id, expiry, picture, also)
    proposed = tuple(wording for wording in old.proposed if wording in also and wording not in added)
    return taught(bundle, [new.model_copy(update={"proposed": proposed})], reader, when_full="refuse")


def _without(bundle: Bundle | None, reader: FactReader, *, example_id: str) -> Bundle:
    assert bundle is not None  # the name is loaded
    return forgotten(bundle, [example_id])


async def _facts(examples: Sequence[TaughtExample], engine: MemoryEngine) -> list[FactRecord]:
    """Facts of examples; what their pictures are like is asked of the engine, a few at a time."""

    async def fact(place: int) -> FactRecord:
        example = examples[place]
        question, picture = await _asked(example.messages, example.id or f"number {place + 1}", engine)
        return fact_of(question, example.answer, example.task, example.id, example.expires_at, picture, example.also)

    facts: list[FactRecord] = []
    while len(facts) < len(examples):
        at_once = range(len(facts), min(len(facts) + PICTURES_AT_ONCE, len(examples)))
        facts += await asyncio.gather(*map(fact, at_once))
    return facts


async def _proposed(facts: Sequence[FactRecord], most: Mapping[str, int], engine: MemoryEngine) -> dict[str, list[str]]:
    """What the served model proposes, by the ids of the facts that want so many wordings.

    Raises:
        TaskDataError: such a fact is about pictures, or the model does not take its question.
    """
    wanting = [fact for fact in facts if fact.id in most]
    if about_pictures := [fact.id for fact in wanting if fact.picture is not None]:
        raise TaskDataError(f"example {about_pictures[0]!r}: no wordings are proposed of a question with pictures")
    at_once = asyncio.Semaphore(PROPOSED_AT_ONCE)

    async def wordings(fact: FactRecord) -> list[str]:
        async with at_once:
            try:
                return await engine.wordings(fact.question, most[fact.id])
            except TaskDataError as error:
                raise TaskDataError(f"example {fact.id!r}: {error}") from error

    found = await asyncio.gather(*map(wordings, wanting))
    return {fact.id: texts for fact, texts in zip(wanting, found, strict=True)}


async def _asked(messages: Sequence[ExampleMessage], example: str, engine: MemoryEngine) -> Asked:
    """The text of the one user message, and the state of its pictures, if it has any.

    Raises:
        TaskDataError: there are other messages, or something else than text and pictures is in it.
        UnsupportedModel: pictures cannot be told from each other with this model.
    """
    users = [message for message in messages if message.role == "user"]
    if len(users) != 1 or messages[-1].role != "user":
        raise TaskDataError(f"example {example}: a fact is one question: expected one user message, the last one")
    content: Any = users[0].content
    if isinstance(content, str):
        return content, None
    texts = [part["text"] for part in content if part.get("type") == "text" and isinstance(part.get("text"), str)]
    pictures = [part for part in content if is_picture(part)]
    if len(texts) + len(pictures) < len(content):
        kinds = sorted({str(part.get("type"))[:40] for part in content})
        raise TaskDataError(
            f"example {example}: expected text and pictures, found parts of the types {', '.join(kinds)}"
        )
    try:
        return "\n".join(texts), await engine.picture_state(content) if pictures else None
    except InduceKVError as error:
        raise type(error)(f"example {example}: {error}") from error


def _shown(fact: FactRecord, superseded_by: str | None, is_admin: bool) -> MemoryExample:
    return MemoryExample(
        id=fact.id,
        task=fact.task,
        question=fact.question if is_admin else None,
        answer=fact.answer if is_admin else None,
        also=list(fact.also) if is_admin else None,
        proposed=list(fact.proposed) if is_admin else None,
        source_digest=fact.source_digest,
        created_at=fact.created_at,
        expires_at=fact.expires_at,
        has_picture=fact.picture is not None,
        superseded_by=superseded_by,
    )


def _answer(changed: ChangedFacts, ids: Sequence[str], gone: Sequence[str] = ()) -> TaughtBundle:
    card = changed.card
    superseded = [old for old, new in replaced_by(changed.after.metadata.facts).items() if new in ids]
    return TaughtBundle(
        name=card.name,
        digest=card.digest,
        ids=list(ids),
        forgotten=list(gone),
        superseded=superseded,
        facts=card.facts,
    )
