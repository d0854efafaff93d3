"""The bodies of requests: how large they may be, and how a large one is read beside other requests."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable, Coroutine
from http import HTTPStatus
from typing import Any, Final

from fastapi import Request
from fastapi.responses import JSONResponse, Response
from fastapi.routing import APIRoute
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from inducekv_vllm.vllm_seams.config import ADMIN_HEADER

from .requests import OUR_ROUTES, access_of, admin, error_answer

DEFAULT_BYTES: Final = 64 * 2**20  # of our routes, where the server was not told
INLINE_BYTES: Final = 2**16  # a shorter body is parsed at once


class BodyTooLarge(Exception):
    """More bytes have come than this server takes. Only `BodyMiddleware` sees it."""


class BodyMiddleware:
    """Answers a body that is too large with 413, before it is read, or as soon as more has come than was declared."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        most = _most_bytes(scope) if scope["type"] == "http" else None
        if most is None:
            await self._app(scope, receive, send)
            return
        declared = Headers(scope=scope).get("content-length", "")
        if declared.isdecimal() and int(declared) > most:
            await _too_large(most, declared)(scope, receive, send)
            return
        read, has_begun = 0, False

        async def limited() -> Message:
            nonlocal read
            message = await receive()
            read += len(message.get("body", b""))
            if read > most:
                raise BodyTooLarge
            return message

        async def noted(message: Message) -> None:
            nonlocal has_begun
            if has_begun or read <= most:  # otherwise it is what FastAPI makes of the error
                has_begun = True
                await send(message)

        with contextlib.suppress(BodyTooLarge):
            await self._app(scope, limited, noted)
        if read > most and not has_begun:
            await _too_large(most, "more")(scope, receive, send)


def _too_large(most: int, found: str) -> JSONResponse:
    reason = f"the body of a request may have {most} bytes here (max_body_bytes), found {found}"
    return error_answer(reason, HTTPStatus.REQUEST_ENTITY_TOO_LARGE)


def _most_bytes(scope: Scope) -> int | None:
    given = access_of(Request(scope)).max_body_bytes
    is_ours = scope["path"].removeprefix(scope.get("root_path", "")).startswith(OUR_ROUTES)
    return DEFAULT_BYTES if given is None and is_ours else given


class MemoryRoute(APIRoute):
    """A route of ours: it asks for the admin's key, if it needs one, before it reads the body."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """FastAPI's, which reads the body first, behind the check."""
        handle = super().get_route_handler()
        needs_admin = any(dependency.call is admin for dependency in self.dependant.dependencies)

        async def checked(request: Request) -> Response:
            if needs_admin:
                await admin(request, request.headers.get(ADMIN_HEADER))
            return await handle(ReadApart(request.scope, request.receive))

        return checked


class ReadApart(Request):
    """A request whose body is parsed in a thread, if it is large."""

    async def json(self) -> Any:
        """As of any request."""
        if not hasattr(self, "_json"):
            self._json = await parsed(await self.body())
        return self._json


async def parsed(body: bytes) -> Any:
    """The value of a JSON text; other requests go on meanwhile. Raises ValueError, RecursionError."""
    if len(body) < INLINE_BYTES:
        return json.loads(body)
    return await asyncio.to_thread(json.loads, body, object_hook=_same)


def _same(value: dict[str, Any]) -> dict[str, Any]:
    """Called after each object of a JSON text: the parser, which is C code, lets other threads run meanwhile."""
    return value
