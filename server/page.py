"""`--memory-page`: a page for people, and the route of the latest decisions that it shows.

It needs no assets from elsewhere.
"""

import secrets
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse, Response

from inducekv_vllm.vllm_seams.config import ADMIN_HEADER

from .requests import TAG, Admin, error_answer, errors, registry_of
from .schemas import MemoryDecision, MemoryDecisions

router = APIRouter(tags=[TAG])
PAGE: Final = Path(__file__).with_name("page.html").read_text()
OFF: Final = "this server has no page: start it with --memory-page"


@router.get("/memory", include_in_schema=False)
async def page(request: Request) -> Response:
    """The page holds nothing: what it shows it asks for by the other routes, with the keys that are typed into it."""
    if registry_of(request).journal.latest is None:
        return error_answer(OFF, HTTPStatus.NOT_FOUND)
    nonce = secrets.token_urlsafe(16)
    text = PAGE.replace("{{nonce}}", nonce).replace("{{header}}", ADMIN_HEADER)
    policy = f"default-src 'none'; script-src 'nonce-{nonce}'; style-src 'unsafe-inline'; connect-src 'self'"
    policy += "; img-src data:"
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
    if (latest := registry_of(request).journal.latest) is None:
        return error_answer(OFF, HTTPStatus.NOT_FOUND)
    return MemoryDecisions(data=[MemoryDecision(**each) for each in latest])
