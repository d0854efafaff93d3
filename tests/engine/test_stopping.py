"""The end of an engine: requests and calls end with it, and with a time-out those that run may end before it."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.exceptions import RetryableRequestError
from vllm.v1.engine.exceptions import EngineDeadError

from inducekv_vllm.frontend.stopping import EngineStop

pytestmark = pytest.mark.anyio


class Engine:
    """A client whose engine answers nothing after its shutdown."""

    def __init__(self) -> None:
        self.errored = False
        self.dead_error = EngineDeadError()
        self.unfinished = 0
        self.timeouts: list[float | None] = []
        self.aborted: list[str] = []
        self.answers: list[asyncio.Future[str]] = []
        states = {"a": None, "b": None}
        self.output_processor = SimpleNamespace(request_states=states, abort_requests=self.abort)

    def abort(self, request_ids: list[str], internal: bool) -> None:
        assert internal
        for request_id in request_ids:
            del self.output_processor.request_states[request_id]
        self.aborted += request_ids

    async def collective_rpc(self, method: str, *args: Any, **kwargs: Any) -> str:
        self.answers.append(asyncio.get_running_loop().create_future())
        return await self.answers[-1]

    def shutdown(self, timeout: float | None = None) -> None:
        self.timeouts.append(timeout)

    def get_num_unfinished_requests(self) -> int:
        return self.unfinished


def stopped(engine: Any) -> EngineStop:
    stop = EngineStop(engine)
    stop.install()
    return stop


async def shut_down(engine: Engine, timeout: float | None) -> None:
    """As vLLM's launcher does."""
    await asyncio.to_thread(engine.shutdown, timeout=timeout)
    await asyncio.sleep(0)


async def test_what_waits_ends_with_the_engine() -> None:
    engine = Engine()
    stopped(engine)
    call = asyncio.create_task(engine.collective_rpc("inducekv_pop_key"))
    await asyncio.sleep(0)
    await shut_down(engine, 0)
    assert engine.aborted == ["a", "b"]
    with pytest.raises(RetryableRequestError, match="shutting down"):
        await asyncio.wait_for(call, 5)
    assert engine.timeouts == [0]


async def test_a_shutdown_on_the_event_loop_does_not_wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM calls it once more there, when the HTTP server has ended."""
    monkeypatch.setattr("inducekv_vllm.frontend.stopping.LOOP_WAIT_S", None)  # for ever
    engine = Engine()
    stopped(engine)
    engine.unfinished = 1
    call = asyncio.create_task(engine.collective_rpc("inducekv_pop_key"))
    await asyncio.sleep(0)
    engine.shutdown(timeout=1e6)
    assert engine.aborted == ["a", "b"]
    assert len(engine.timeouts) == 1
    with pytest.raises(RetryableRequestError, match="shutting down"):
        await call


async def test_a_call_does_not_wait_for_a_dead_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inducekv_vllm.frontend.stopping.ENGINE_CHECK_S", 0.01)
    engine = Engine()
    stop = stopped(engine)
    call = asyncio.create_task(engine.collective_rpc("inducekv_load_bundle"))
    await asyncio.sleep(0)
    engine.errored = True
    for each in (call, engine.collective_rpc("inducekv_load_bundle")):
        with pytest.raises(EngineDeadError):
            await asyncio.wait_for(each, 5)
    assert not stop._calls


@pytest.mark.parametrize("busy", ["memory", "engine"])
async def test_a_drain_waits_for_what_runs_and_refuses_what_is_new(busy: str) -> None:
    engine = Engine()
    stop = stopped(engine)
    running = stop.running()
    if busy == "memory":
        running.__enter__()
    else:
        engine.unfinished = 1
    ending = asyncio.create_task(shut_down(engine, 60))
    while not stop.requested:
        await asyncio.sleep(0.01)
    with pytest.raises(RetryableRequestError, match="shutting down"):
        stop.refuse_new()
    with pytest.raises(RetryableRequestError), stop.running():
        pass
    await asyncio.sleep(0.2)
    assert engine.timeouts == []
    if busy == "memory":
        running.__exit__(None, None, None)
    engine.unfinished = 0
    await asyncio.wait_for(ending, 10)
    (timeout,) = engine.timeouts
    assert timeout is not None
    assert 40 < timeout < 60  # what is left
