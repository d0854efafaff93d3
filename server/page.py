"""`--memory-page`: a page for people, and the latest decisions that it shows. It needs no assets from elsewhere."""

from __future__ import annotations

import secrets
from collections import deque
from datetime import UTC, datetime
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse, Response

from inducekv_vllm.engine.memory import Memory
from inducekv_vllm.engine.trace import describe_facts, describe_gate
from inducekv_vllm.host.config import ADMIN_HEADER
from inducekv_vllm.protocol import Decision

from .requests import TAG, Admin, error_answer, errors
from .schemas import MemoryDecision, MemoryDecisions

router = APIRouter(tags=[TAG])
PAGE: Final = Path(__file__).with_name("page.html").read_text()
KEPT: Final = 50  # decisions
OFF: Final = "this server has no page: start it with --memory-page"


class LatestDecisions:
    """Those of one API process, without anything of the requests."""

    def __init__(self) -> None:
        self._kept: deque[MemoryDecision] = deque(maxlen=KEPT)

    def note(self, name: str, memory: Memory, decision: Decision) -> None:
        """What a request is answered with, as it begins."""
        gate, facts = describe_gate(memory, decision), [fact["id"] for fact in describe_facts(memory, decision)]
        found = MemoryDecision(at=datetime.now(UTC), bundle=name, digest=memory.digest, gate=gate, facts=facts)
        self._kept.appendleft(found)

    def shown(self) -> MemoryDecisions:
        return MemoryDecisions(data=list(self._kept))


def decisions_of(request: Request) -> LatestDecisions | None:
    """None without the page."""
    found: LatestDecisions | None = request.app.state.inducekv_decisions
    return found


@router.get("/memory", include_in_schema=False)
async def page(request: Request) -> Response:
    """The page holds nothing: what it shows it asks for by the other routes, with the keys that are typed into it."""
    if decisions_of(request) is None:
        return error_answer(OFF, HTTPStatus.NOT_FOUND)
    nonce = secrets.token_urlsafe(16)
    text = PAGE.replace("{{nonce}}", nonce).replace("{{header}}", ADMIN_HEADER)
    policy = f"default-src 'none'; script-src 'nonce-{nonce}'; style-src 'unsafe-inline'; connect-src 'self'"
    headers = {
        "Content-Security-Policy": f"{policy}; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
        "Cache-Control": "no-store",
    }
    return HTMLResponse(text, headers=headers)


@router.get(
    "/v1/memory_decisions",
    summary="Show the latest decisions",
    response_model=MemoryDecisions,
    responses=errors(
        UNAUTHORIZED="The admin key is missing or wrong.",
        FORBIDDEN="The server was started without an admin key.",
        NOT_FOUND="The server has no page.",
    ),
)
async def memory_decisions(request: Request, admin: Admin) -> Any:
    """What the latest requests to bundles of this API process were answered with, the last one first.

    Only with `--memory-page`.
    """
    found = decisions_of(request)
    return error_answer(OFF, HTTPStatus.NOT_FOUND) if found is None else found.shown()
