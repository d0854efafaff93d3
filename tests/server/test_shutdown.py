"""SIGTERM while a server loads a bundle, computes query keys and streams answers: every client gets an end.

The engine of a server that is told to stop may be gone before it has reported the end of its requests.
These are the last tests of the server that the HTTP tests share (tests/conftest.py).
"""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from benchmarks.server_process import processes_of, serving
from inducekv_vllm.bundle import with_metadata, write_bundle
from tests.engine.parity import FEWER_PROCESSES, Prompt, World, prompts
from tests.server.http import Bundles, wait_until
from tests.server.launch import ENVIRONMENT, FLAGS
from tests.server.ranks import HELD_ENTRY, held_file

STREAMS = 8  # of each model: more than the engine runs at once, so that others wait
TOKENS = 200
SECONDS = 60.0  # in which a server that waits for nobody has long ended, even on a busy machine


@dataclass
class Stream:
    """What a client has got of one answer."""

    model: str
    tokens: int = 0
    finish_reason: str | None = None
    error: str | None = None
    is_sent: bool = False
    is_done: bool = False

    def read(self, url: str, prompt: Prompt) -> Stream:
        body = {"model": self.model, "messages": prompt.messages, "max_tokens": TOKENS, "stream": True}
        body |= {"ignore_eos": True, "temperature": 1.0}
        path, extensions = f"{url}/v1/chat/completions", {"trace": self.trace}
        with (
            httpx.Client(timeout=4 * SECONDS) as client,
            client.stream("POST", path, json=body, extensions=extensions) as response,
        ):
            if response.status_code != 200:
                self.error = str(json.loads(response.read())["error"]["code"])
                self.is_done = True
                return self
            for line in response.iter_lines():
                self.take(line.removeprefix("data: "))
        return self

    def trace(self, event: str, _: Mapping[str, Any]) -> None:
        self.is_sent |= event == "http11.send_request_body.complete"

    def take(self, data: str) -> None:
        if data == "[DONE]":
            self.is_done = True
        elif data:
            part: dict[str, Any] = json.loads(data)
            if "error" in part:
                self.error = str(part["error"]["code"])
            for choice in part.get("choices", ()):
                self.tokens += 1
                self.finish_reason = choice["finish_reason"] or self.finish_reason


@dataclass
class Stopped:
    """What the clients got of a server that had SIGTERM while it was busy."""

    streams: list[Stream]
    begun: list[bool]  # whether the stream had begun before
    load: Future[httpx.Response]
    seconds: float  # from the signal to the last stream's end


def stop(world: World, url: str, *, drains: bool) -> Stopped:
    """The server has ended by itself when this returns.

    A load is under way when the signal comes, in the worker; with `drains` it goes on then. The load is
    sent after the streams: a server that stops resets a connection that it has not read.
    """
    late = world.paths["other"].with_name("late.safetensors")
    first, *others = world.bundles["other"].metadata.entries
    bundle = with_metadata(world.bundles["other"], entries=(first.model_copy(update={"id": HELD_ENTRY}), *others))
    write_bundle(bundle, late)
    held = held_file(late)
    server = psutil.Process(processes_of(url)[0])
    with ThreadPoolExecutor(2 * STREAMS + 1) as pool:
        streams = [Stream(model) for model in ("first", "base") * STREAMS]
        reading = [pool.submit(s.read, url, p) for s, p in zip(streams, prompts(2 * STREAMS, seed=41), strict=True)]
        wait_until(lambda: any(s.tokens > 5 for s in streams if s.model == "first"), 4 * SECONDS)
        wait_until(lambda: all(s.is_sent for s in streams), 4 * SECONDS)
        load = pool.submit(Bundles(url).load, "late", late)
        wait_until(held.exists, 4 * SECONDS)
        wait_until(lambda: any(5 < s.tokens < TOKENS // 2 for s in streams), 4 * SECONDS)  # in the middle of an answer
        begun = [stream.tokens > 0 for stream in streams]
        began = time.monotonic()
        server.send_signal(signal.SIGTERM)
        if drains:
            held.unlink()
        stopped = Stopped([future.result() for future in reading], begun, load, time.monotonic() - began)
    wait_until(lambda: not server.is_running() or server.status() == psutil.STATUS_ZOMBIE, 4 * SECONDS)
    return stopped


def test_without_a_timeout_streams_end_where_they_are_and_the_load_is_refused(server: str, world: World) -> None:
    stopped = stop(world, server, drains=False)
    assert all(stream.is_done for stream in stopped.streams), stopped.streams
    answer = stopped.load.result(SECONDS)
    assert (answer.status_code, answer.json().get("name")) == (503, None)
    ends = [stream.finish_reason for stream, begun in zip(stopped.streams, stopped.begun, strict=True) if begun]
    assert "abort" in ends, stopped.streams
    assert set(ends) <= {"abort", "length"}
    assert stopped.seconds < SECONDS


@pytest.mark.slow
def test_with_a_timeout_what_has_begun_is_done(world: World, tmp_path: Path) -> None:
    arguments = [str(world.model), f"--memory=first={world.paths['first']}", *FLAGS, "--served-model-name", "base"]
    arguments += ["--memory-root", str(tmp_path.parents[1]), "--worker-cls", "tests.server.ranks.HoldingWorker"]
    arguments += ["--shutdown-timeout", "120"]
    with serving(arguments, tmp_path / "log", {**ENVIRONMENT, **FEWER_PROCESSES}) as url:
        stopped = stop(world, url, drains=True)
    assert all(stream.is_done for stream in stopped.streams), stopped.streams
    answer = stopped.load.result(SECONDS)
    assert (answer.status_code, answer.json().get("name")) == (200, "late")
    ends = [stream.finish_reason for stream, begun in zip(stopped.streams, stopped.begun, strict=True) if begun]
    assert set(ends) == {"length"}
    # Those that have not reached the engine are refused: by us, or by vLLM if it still reads their pictures.
    assert {stream.error for stream in stopped.streams} <= {None, "503", "500"}
