"""Calls between the API processes of one server, over a Unix socket.

The first process listens, the others connect. A message is a length in four bytes and so many bytes of JSON. Each side
may call the other; what is called begins in the order of the messages, and what does not wait ends in this order too.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import shutil
import tempfile
from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final

from vllm.exceptions import RetryableRequestError

from inducekv_vllm import errors
from inducekv_vllm.host.logs import logger_of

from .access import ChangeRefused

logger = logger_of(__name__)

Handler = Callable[..., Awaitable[Any]]  # takes the arguments of a call by name; returns what JSON can hold
LENGTH_BYTES: Final = 4
# Errors that are the same on both sides; others arrive as RuntimeError.
_ERRORS: Final[dict[str, type[Exception]]] = {
    "RetryableRequestError": RetryableRequestError,
    **{name: kind for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, ValueError)},
}


class Link:
    """One end of the connection of two processes. It belongs to an event loop."""

    def __init__(self, name: str, handlers: Mapping[str, Handler]) -> None:
        """`name` is what errors call the other process; `handlers` are what it may call here, by name."""
        self.name = name
        self.handlers = handlers
        self._numbers = itertools.count()
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._running: set[asyncio.Task[None]] = set()
        self._writer: asyncio.StreamWriter | None = None
        self.on_lost: Callable[[], None] = lambda: None

    @property
    def is_open(self) -> bool:
        return self._writer is not None and not self._writer.is_closing()

    def begin(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self._spawn(self._read(reader))

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()

    def call(self, method: str, **arguments: Any) -> asyncio.Future[Any]:
        """Call a handler of the other process; the message is sent at once. The future has the handler's result.

        Raises:
            RetryableRequestError: the other process is gone; or in the future, if it goes before it has answered.
            InduceKVError, ChangeRefused, RetryableRequestError: in the future, what the handler has raised.
            RuntimeError: in the future, the handler has failed otherwise.
        """
        number = next(self._numbers)
        self._send({"call": method, "arguments": arguments, "number": number})
        future = self._calls[number] = asyncio.get_running_loop().create_future()
        future.add_done_callback(lambda _: self._calls.pop(number, None))
        return future

    def tell(self, method: str, **arguments: Any) -> None:
        """`call` without waiting for the end. Does nothing if the other process is gone."""
        with contextlib.suppress(RetryableRequestError):
            self._send({"call": method, "arguments": arguments, "number": None})

    def _send(self, message: dict[str, Any]) -> None:
        if not self.is_open:
            raise self._gone()
        assert self._writer is not None
        body = json.dumps(message).encode()
        self._writer.write(len(body).to_bytes(LENGTH_BYTES, "big") + body)

    def _gone(self) -> RetryableRequestError:
        return RetryableRequestError(f"{self.name} of this server is gone: the server is shutting down")

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                size = int.from_bytes(await reader.readexactly(LENGTH_BYTES), "big")
                self._take(json.loads(await reader.readexactly(size)))
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            self.close()
            for future in list(self._calls.values()):
                if not future.done():
                    future.set_exception(self._gone())
            self.on_lost()

    def _take(self, message: dict[str, Any]) -> None:
        if "call" in message:
            self._spawn(self._answer(message["call"], message["arguments"], message["number"]))
            return
        future = self._calls.get(message["number"])
        if future is None or future.done():  # whoever has called does not wait any more
            return
        if "error" in message:
            future.set_exception(_error_of(message["error"]))
        else:
            future.set_result(message["result"])

    async def _answer(self, method: str, arguments: dict[str, Any], number: int | None) -> None:
        try:
            answer: dict[str, Any] = {"result": await self.handlers[method](**arguments)}
        except Exception as error:
            if number is None or not isinstance(error, (*_ERRORS.values(), ChangeRefused)):
                logger.exception("%s called %s, which has failed", self.name, method)
            answer = {"error": _described(error)}
        if number is not None:
            with contextlib.suppress(RetryableRequestError):
                self._send({**answer, "number": number})

    def _spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)


def _described(error: Exception) -> dict[str, Any]:
    status = error.status.value if isinstance(error, ChangeRefused) else None
    return {"type": type(error).__name__, "message": str(error) or repr(error), "status": status}


def _error_of(described: dict[str, Any]) -> Exception:
    if described["status"] is not None:
        return ChangeRefused(described["message"], HTTPStatus(described["status"]))
    return _ERRORS.get(described["type"], RuntimeError)(described["message"])


class Meeting:
    """A socket in a folder that only this user can enter, while the other processes connect."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="inducekv-"))  # mode 0700
        self.address = str(self._folder / "first")
        self._server: asyncio.Server | None = None

    async def open(self, accept: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]) -> None:
        self._server = await asyncio.start_unix_server(accept, self.address)

    def close(self) -> None:
        """Nobody else can connect, and nothing is left on the disk; connections stay."""
        if self._server is not None:
            self._server.close()
        shutil.rmtree(self._folder, ignore_errors=True)
