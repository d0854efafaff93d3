"""The routes that teach a bundle facts, list them, correct and forget them: no training, beside running requests."""

import asyncio
import contextlib
from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any, Final

from fastapi import APIRouter, Depends, Path, Query, Request, Response
from vllm.entrypoints.serve.utils.api_utils import validate_json_request

from inducekv_vllm.backbone.fact_reader import FactReader
from inducekv_vllm.bundle import Bundle, FactRecord, PictureRecord
from inducekv_vllm.errors import InduceKVError, TaskDataError, UnknownBundle, UnknownFact
from inducekv_vllm.frontend.memory_engine import MemoryEngine
from inducekv_vllm.frontend.pictures import is_picture
from inducekv_vllm.teaching import Taught, fact_of, forgotten, taught

from .bodies import MemoryRoute
from .registry import BundleRegistry, ChangedFacts
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
    Change,
    CorrectExampleRequest,
    ExampleMessage,
    MemoryExample,
    MemoryExampleList,
    TaughtBundle,
    TaughtExample,
    TeachRequest,
)

Asked = tuple[str, PictureRecord | None]  # a question's text, and its pictures
PICTURES_AT_ONCE: Final = 8
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
    facts = await _facts(body.examples, request.app.state.inducekv_engine)
    registry, engine = registry_of(request), request.app.state.inducekv_engine
    last_used = await registry.journal.uses(name)
    resembled = await _resembled(engine, registry, name, facts)

    def make(bundle: Bundle | None, reader: FactReader) -> Taught:
        return taught(bundle, facts, reader, body.budget_bytes, when_full=body.when_full, last_used=last_used)

    changed = await registry.change_facts(Change.TEACH, name, make, expected_digest=body.expected_digest, who=admin)
    with contextlib.suppress(UnknownBundle):  # it is unloaded by now
        await engine.facts.prepare(await asyncio.to_thread(registry.memory, name))
    return _answer(changed, resembled)


@router.get(
    "/v1/memory_bundles/{name:path}/examples",
    summary="List the facts of a bundle",
    response_model=MemoryExampleList,
    responses=NOT_LOADED | BAD_QUERY,
)
async def examples(
    name: Name,
    request: Request,
    key: KeyToSeeMore = None,
    after: Annotated[str, Query(description="Begin behind this id, such as the last one of the page before.")] = "",
    limit: Annotated[int, Query(ge=1, le=10_000)] = 1000,
) -> Response:
    """In the order of their ids."""
    registry, is_admin = registry_of(request), access_of(request).is_admin(key)

    def listed() -> str:
        memory = registry.memory(name)
        page, has_more = memory.fact_list.page(after, limit)
        data = [_shown(fact, newer, is_admin) for fact, newer in page]
        return MemoryExampleList(digest=memory.digest, data=data, has_more=has_more).model_dump_json()

    return Response(await asyncio.to_thread(listed), media_type="application/json")  # requests are not to wait for it


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
    await asyncio.to_thread(registry.memory, name)  # or it is 404
    asked = None
    if body.messages is not None:
        asked = await _asked(body.messages, example_id, request.app.state.inducekv_engine)
    make = partial(_corrected, example_id=example_id, asked=asked, body=body)
    return _answer(
        await registry.change_facts(Change.TEACH, name, make, expected_digest=body.expected_digest, who=admin)
    )


@router.delete(
    "/v1/memory_bundles/{name:path}/examples/{example_id:path}",
    summary="Forget a fact",
    responses=CHANGE_ERRORS | NOT_LOADED | TOO_LONG,
)
async def forget(
    name: Name, example_id: ExampleId, request: Request, admin: Admin, expected_digest: str | None = None
) -> TaughtBundle:
    """Versions before this one keep it for a rollback, until they are forgotten."""
    registry, make = registry_of(request), partial(_without, example_id=example_id)
    return _answer(
        await registry.change_facts(Change.FORGET_FACTS, name, make, expected_digest=expected_digest, who=admin)
    )


def _corrected(
    bundle: Bundle | None, reader: FactReader, *, example_id: str, asked: Asked | None, body: CorrectExampleRequest
) -> Taught:
    known = {fact.id: fact for fact in bundle.metadata.facts} if bundle is not None else {}
    if example_id not in known:
        raise UnknownFact(f"the bundle has no fact {example_id!r}")
    old = known[example_id]
    question, picture = asked or (old.question, old.picture)
    expiry = body.expires_at or old.expires_at
    if stray := [wording for wording in body.without if wording not in old.also]:
        raise TaskDataError(f"example {example_id!r} has no wording {stray[0]!r}")
    kept = [wording for wording in old.also if wording not in body.without]
    also = list(dict.fromkeys([*kept, *(body.also or [])]))
    new = fact_of(question, body.answer or old.answer, old.task, example_id, expiry, picture, also)
    return taught(bundle, [new], reader, when_full="refuse")


def _without(bundle: Bundle | None, reader: FactReader, *, example_id: str) -> Taught:
    assert bundle is not None  # the name is loaded
    return forgotten(bundle, [example_id])


async def _facts(examples: Sequence[TaughtExample], engine: MemoryEngine) -> list[FactRecord]:
    """Facts of examples; pictures are decoded a few at a time."""

    async def fact(place: int) -> FactRecord:
        example = examples[place]
        question, picture = await _asked(example.messages, example.id or f"number {place + 1}", engine)
        return fact_of(question, example.answer, example.task, example.id, example.expires_at, picture, example.also)

    facts: list[FactRecord] = []
    while len(facts) < len(examples):
        at_once = range(len(facts), min(len(facts) + PICTURES_AT_ONCE, len(examples)))
        facts += await asyncio.gather(*map(fact, at_once))
    return facts


async def _resembled(
    engine: MemoryEngine, registry: BundleRegistry, name: str, facts: Sequence[FactRecord]
) -> dict[str, list[str]]:
    try:
        memory = await asyncio.to_thread(registry.memory, name)
    except UnknownBundle:  # the first version of a name
        return {}
    return await engine.facts.resembled(memory, facts)


async def _asked(messages: Sequence[ExampleMessage], example: str, engine: MemoryEngine) -> Asked:
    """The text of the one user message, and its pictures, if it has any.

    Raises:
        TaskDataError: there are other messages, something else than text and pictures is in it, or a picture cannot be
            used.
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
        return "\n".join(texts), await engine.picture(content) if pictures else None
    except InduceKVError as error:
        raise type(error)(f"example {example}: {error}") from error


def _shown(fact: FactRecord, superseded_by: str | None, is_admin: bool) -> MemoryExample:
    return MemoryExample(
        id=fact.id,
        task=fact.task,
        question=fact.question if is_admin else None,
        answer=fact.answer if is_admin else None,
        also=list(fact.also) if is_admin else None,
        source_digest=fact.source_digest,
        created_at=fact.created_at,
        expires_at=fact.expires_at,
        has_picture=fact.picture is not None,
        picture=fact.picture.data_url if fact.picture is not None and is_admin else None,
        superseded_by=superseded_by,
    )


def _answer(changed: ChangedFacts, resembled: dict[str, list[str]] | None = None) -> TaughtBundle:
    card, report = changed.card, changed.report
    return TaughtBundle(
        name=card.name,
        digest=card.digest,
        ids=list(report.ids),
        forgotten=list(report.dropped),
        superseded=list(report.replaced),
        returned=list(report.returned),
        resembles=resembled or {},
        facts=report.facts,
    )
