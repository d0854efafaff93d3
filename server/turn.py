"""The turn of an HTTP request: it sees every change before it, and what it has asked for stays until it ends."""

from __future__ import annotations

import contextlib
from contextvars import ContextVar
from typing import Final

from starlette.types import ASGIApp, Receive, Scope, Send

# What ends with the request that runs; None outside of one.
TURN: Final[ContextVar[contextlib.ExitStack | None]] = ContextVar("inducekv_turn", default=None)


class TurnMiddleware:
    """See the module docstring."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        await scope["app"].state.inducekv_registry.following.see_changes()
        with contextlib.ExitStack() as stack:
            stack.callback(TURN.reset, TURN.set(stack))
            await self._app(scope, receive, send)
