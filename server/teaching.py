"""The routes that teach a bundle facts, list them, correct and forget them: no training, beside running requests."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Path, Query, Request
from vllm.entrypoints.serve.utils.api_utils import validate_json_request

from inducekv_vllm.backbone.stored_facts import FactReader
from inducekv_vllm.bundle import Bundle, FactRecord
from inducekv_vllm.errors import TaskDataError, UnknownFact
from inducekv_vllm.teaching import fact_of, forgotten, left_out, superseded, taught

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
    MemoryBundleCard,
    MemoryExample,
    MemoryExampleList,
    TaughtBundle,
    TaughtExample,
    TeachRequest,
)

router = APIRouter(tags=[TAG])
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
    facts = [_fact(example, place) for place, example in enumerate(body.examples)]
    registry = registry_of(request)
    gone: list[str] = []
    full: dict[str, Any] = {"when_full": body.when_full, "last_used": await registry.uses(name)}

    def make(bundle: Bundle | None, reader: FactReader) -> Bundle:
        made = taught(bundle, facts, reader, body.budget_bytes, **full)
        gone[:] = left_out(bundle, made)
        return made

    card = await registry.change_facts("teach", name, make, expected_digest=body.expected_digest, who=admin)
    return _answer(card, [fact.id for fact in facts], gone)


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
    newer = superseded(facts)
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
    """Give a fact another answer, question or date: it counts as the newest one then."""
    question = None if body.messages is None else _question(body.messages, example_id)
    make = partial(_corrected, example_id=example_id, question=question, body=body)
    registry = registry_of(request)
    registry.metadata(name)
    card = await registry.change_facts("teach", name, make, expected_digest=body.expected_digest, who=admin)
    return _answer(card, [example_id])


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
    card = await registry.change_facts("forget_facts", name, make, expected_digest=expected_digest, who=admin)
    return _answer(card, [example_id])


def _corrected(
    bundle: Bundle | None, reader: FactReader, *, example_id: str, question: str | None, body: CorrectExampleRequest
) -> Bundle:
    known = {fact.id: fact for fact in bundle.metadata.facts} if bundle is not None else {}
    if example_id not in known:
        raise UnknownFact(f"the bundle has no fact {example_id!r}")
    old = known[example_id]
    new = fact_of(
        question or old.question,
        body.answer or old.answer,
        old.task,
        example_id,
        body.expires_at or old.expires_at,
    )
    return taught(bundle, [new], reader, when_full="refuse")


def _without(bundle: Bundle | None, reader: FactReader, *, example_id: str) -> Bundle:
    assert bundle is not None  # the name is loaded
    return forgotten(bundle, [example_id], reader)


def _fact(example: TaughtExample, place: int) -> FactRecord:
    question = _question(example.messages, example.id or f"number {place + 1}")
    return fact_of(question, example.answer, example.task, example.id, example.expires_at)


def _question(messages: Sequence[ExampleMessage], example: str) -> str:
    """The text of the one user message. Raises TaskDataError: there are others, or it is not text alone."""
    users = [message for message in messages if message.role == "user"]
    if len(users) != 1 or messages[-1].role != "user":
        raise TaskDataError(f"example {example}: a fact is one question: expected one user message, the last one")
    content: Any = users[0].content
    if isinstance(content, str):
        return content
    if any(part.get("type") != "text" or not isinstance(part.get("text"), str) for part in content):
        kinds = sorted({str(part.get("type"))[:40] for part in content})
        raise TaskDataError(
            f"example {example}: facts are found by words: expected text, found parts of the types {', '.join(kinds)}"
        )
    return "\n".join(part["text"] for part in content)


def _shown(fact: FactRecord, superseded_by: str | None, is_admin: bool) -> MemoryExample:
    return MemoryExample(
        id=fact.id,
        task=fact.task,
        question=fact.question if is_admin else None,
        answer=fact.answer if is_admin else None,
        source_digest=fact.source_digest,
        created_at=fact.created_at,
        expires_at=fact.expires_at,
        superseded_by=superseded_by,
    )


def _answer(card: MemoryBundleCard, ids: Sequence[str], gone: Sequence[str] = ()) -> TaughtBundle:
    return TaughtBundle(name=card.name, digest=card.digest, ids=list(ids), forgotten=list(gone), facts=card.facts)
