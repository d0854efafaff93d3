"""The bodies of requests to our routes: how large they may be, and how a large one is read beside other requests."""

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Coroutine
from http import HTTPStatus
from typing import Any, Final

from fastapi import Request
from fastapi.responses import Response
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException

from inducekv_vllm.vllm_seams.config import ADMIN_HEADER

from .requests import admin

MOST_BYTES: Final = 64 * 2**20
INLINE_BYTES: Final = 2**16  # a shorter body is parsed at once


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
    """A request whose body may not be too large, and is parsed in a thread, if it is large."""

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """As of any request. Raises HTTPException 413: it says that it has too many bytes, or more have come."""
        declared, read = self.headers.get("content-length", ""), 0
        if declared.isdecimal() and int(declared) > MOST_BYTES:
            raise _too_large(declared)
        async for part in super().stream():
            read += len(part)
            if read > MOST_BYTES:
                raise _too_large("more")
            yield part

    async def json(self) -> Any:
        if not hasattr(self, "_json"):
            self._json = await parsed(await self.body())
        return self._json


def _too_large(found: str) -> HTTPException:
    reason = f"the body of a request may have {MOST_BYTES} bytes here, found {found}"
    return HTTPException(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, reason)


async def parsed(body: bytes) -> Any:
    """The value of a JSON text; other requests go on meanwhile. Raises ValueError, RecursionError."""
    if len(body) < INLINE_BYTES:
        return json.loads(body)
    return await asyncio.to_thread(json.loads, body, object_hook=_same)


def _same(value: dict[str, Any]) -> dict[str, Any]:
    """Called after each object of a JSON text: the parser, which is C code, lets other threads run meanwhile."""
    return value
