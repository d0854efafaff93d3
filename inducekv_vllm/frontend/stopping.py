"""The end of a server: what waits for the engine does not outlive it.

On SIGTERM, vLLM's API server calls `AsyncLLM.shutdown` in a thread. It ends the engine, drops the outputs that have not
arrived, and wakes nobody who waits for one: neither a stream nor a call of a worker's method. `EngineStop.install` puts
these steps around it:

1. New requests are refused. With a time-out (`--shutdown-timeout`), those that run may end within it, and so may loads
   of bundles.
2. Streams that are left end as aborted ones, and calls that are left raise an error. Otherwise they would wait for
   ever, or end with the engine's death.
3. vLLM's own shutdown, with what is left of the time-out; then step 2 again, for what came in between.
"""

import asyncio
import contextlib
import itertools
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, cast

from vllm.engine.protocol import EngineClient
from vllm.exceptions import RetryableRequestError
from vllm.v1.engine.async_llm import AsyncLLM

from ..vllm_seams.patches import patch

POLL_S = 0.05
LOOP_WAIT_S = 5.0  # for the event loop of a busy machine
ENGINE_CHECK_S = 1.0  # how often a call looks whether the engine has died


def stopping() -> RetryableRequestError:
    """The error of a request that comes too late; HTTP answers 503."""
    return RetryableRequestError("the server is shutting down; please retry elsewhere")


class EngineStop:
    """See the module docstring. Without `install` it refuses and ends nothing."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self._running = 0
        self._calls: set[asyncio.Future[Any]] = set()
        self.requested = False

    def install(self) -> None:
        """Replace the client's `shutdown` and `collective_rpc`. Call it on the event loop."""
        self._loop = asyncio.get_running_loop()
        self._plain_shutdown, self._plain_rpc = self._client.shutdown, _rpc_of(self._client)
        patch(self._client, "shutdown", lambda _: self.shutdown)
        patch(self._client, "collective_rpc", lambda _: self.collective_rpc)

    def refuse_new(self) -> None:
        """Raise RetryableRequestError if the server is shutting down."""
        if self.requested:
            raise stopping()

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """A shutdown with a time-out waits for the end of this block. Raises RetryableRequestError: it has begun."""
        self.refuse_new()
        self._running += 1
        try:
            yield
        finally:
            self._running -= 1

    async def collective_rpc(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """`AsyncLLM.collective_rpc` with the answers of all engines, which does not wait for one that is gone.

        Raises:
            RetryableRequestError: the server is shutting down, and the engine has not answered.
            EngineDeadError: the engine has died.
        """
        self._require_engine()
        call = asyncio.ensure_future(self._plain_rpc(method, *args, **kwargs))
        self._calls.add(call)
        try:
            while not (await asyncio.wait((call,), timeout=ENGINE_CHECK_S))[0]:
                self._require_engine()
            if call.cancelled():
                raise stopping()
            return call.result()
        finally:
            self._calls.discard(call)
            call.cancel()

    def _require_engine(self) -> None:
        if self._client.errored:
            raise stopping() if self.requested else self._client.dead_error

    def shutdown(self, timeout: float | None = None) -> None:
        """`AsyncLLM.shutdown` with the steps of the module docstring.

        It blocks for as long as the time-out, so call it in a thread. vLLM calls it once more at the very end, on the
        event loop: there it waits for nothing.
        """
        self.requested = True
        deadline = time.monotonic() + (timeout or 0)
        # Without the event loop nothing comes to an end.
        while self._busy() and self._loop.is_running() and not self._is_on_loop() and time.monotonic() < deadline:
            time.sleep(POLL_S)
        self._end_on_loop()
        self._plain_shutdown(timeout=None if timeout is None else max(0.0, deadline - time.monotonic()))
        self._end_on_loop()

    def _busy(self) -> bool:
        unfinished = cast(AsyncLLM, self._client).get_num_unfinished_requests()
        return bool(self._running or unfinished)

    def _end_on_loop(self) -> None:
        """Run `_end_what_waits` where streams and calls live; give up if the event loop is stuck."""
        if self._is_on_loop():
            self._end_what_waits()
            return
        ended = threading.Event()

        def end() -> None:
            self._end_what_waits()
            ended.set()

        with contextlib.suppress(RuntimeError):  # the loop is closed, and nobody waits
            self._loop.call_soon_threadsafe(end)
            ended.wait(LOOP_WAIT_S if self._loop.is_running() else 0.0)

    def _is_on_loop(self) -> bool:
        try:
            return asyncio.get_running_loop() is self._loop
        except RuntimeError:
            return False

    def _end_what_waits(self) -> None:
        processor = cast(AsyncLLM, self._client).output_processor
        processor.abort_requests(list(processor.request_states), internal=True)
        for call in self._calls:
            call.cancel()


def _rpc_of(client: EngineClient) -> Callable[..., Awaitable[list[Any]]]:
    """The client's `collective_rpc`. With data parallelism it calls all engines, and returns the first one's answers:
    then one that returns those of all ranks of all engines.
    """
    core = getattr(client, "engine_core", None)
    if len(getattr(core, "core_engines", ())) < 2:
        return client.collective_rpc

    async def of_all(
        method: str, timeout: float | None = None, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> list[Any]:
        answers = await cast(Any, core).call_utility_all_async("collective_rpc", method, timeout, args, kwargs)
        return list(itertools.chain.from_iterable(answers))

    return of_all
