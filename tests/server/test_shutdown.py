"""SIGTERM while a server loads a bundle, computes query keys and streams answers: every client gets an end, at once.

The engine of a server that is told to stop may be gone before it has reported the end of its requests.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.server_process import starting
from inducekv_vllm.bundle import with_entries, write_bundle
from tests.inducekv_vllm.parity import FEWER_PROCESSES, Prompt, World, prompts
from tests.server.http import Bundles
from tests.server.launch import ENVIRONMENT, FLAGS
from tests.server.ranks import HELD_ENTRY, held_file

STREAMS = 3  # of each model
RUNNING = 4  # requests that the engine runs at once: half of the others wait, some of them in their key pass
TOKENS = 200
SECONDS = 60.0  # in which a server that waits for nobody has long ended, even on a busy machine


@dataclass
class Stream:
    """What a client has got of one answer."""

    model: str
    tokens: int = 0
    finish_reason: str | None = None
    error: str | None = None
    is_done: bool = False

    def read(self, url: str, prompt: Prompt) -> Stream:
        body = {"model": self.model, "messages": prompt.messages, "max_tokens": TOKENS, "stream": True}
        body |= {"ignore_eos": True, "temperature": 1.0}
        with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=4 * SECONDS) as response:
            if response.status_code != 200:
                self.error = str(json.loads(response.read())["error"]["code"])
                self.is_done = True
                return self
            for line in response.iter_lines():
                self.take(line.removeprefix("data: "))
        return self

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


@contextmanager
def stopped(world: World, log: Path, *flags: str, drains: bool) -> Iterator[Stopped]:
    """At the end, the server has ended by itself.

    A load is under way when the signal comes, in the worker; with `drains` it goes on then.
    """
    memory = f"--memory=m={world.paths['sqrt']}"
    late = log.with_name("late.safetensors")
    entries = world.bundles["other"].metadata.entries
    held = (entries[0].model_copy(update={"id": HELD_ENTRY}), *entries[1:])
    write_bundle(with_entries(world.bundles["other"], held), late)
    few = ["--max-num-seqs", str(RUNNING), "--served-model-name", "base", "--memory-root", str(log.parents[1])]
    few += ["--worker-cls", "tests.server.ranks.HoldingWorker", *flags]
    arguments = [str(world.model), memory, *FLAGS, *few]
    with (
        starting(arguments, log, {**ENVIRONMENT, **FEWER_PROCESSES}) as wait_until_healthy,
        ThreadPoolExecutor() as pool,
    ):
        url = wait_until_healthy()
        streams = [Stream(model) for model in ("m", "base") * STREAMS]
        reading = [pool.submit(s.read, url, p) for s, p in zip(streams, prompts(2 * STREAMS, seed=41), strict=True)]
        wait_until(lambda: any(s.tokens > 5 for s in streams if s.model == "m"))
        load = pool.submit(Bundles(url).load, "late", late)
        wait_until(held_file(late).exists)
        begun = [stream.tokens > 0 for stream in streams]
        began = time.monotonic()
        os.kill(server_of(log), signal.SIGTERM)
        if drains:
            held_file(late).unlink()
        yield Stopped([future.result() for future in reading], begun, load, time.monotonic() - began)
        wait_until(lambda: not alive(server_of(log)))


def server_of(log: Path) -> int:
    """The process that serves HTTP."""
    line = next(line for line in log.read_text().splitlines() if "(APIServer pid=" in line)
    return int(line.partition("(APIServer pid=")[2].partition(")")[0])


def alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 4 * SECONDS
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        threading.Event().wait(0.02)


@pytest.mark.parametrize("timeout", [0, pytest.param(120, marks=pytest.mark.slow)])
def test_sigterm(world: World, tmp_path: Path, timeout: int) -> None:
    """Without a time-out streams end where they are, and the load is refused; with one, what has begun is done."""
    with stopped(world, tmp_path / "log", "--shutdown-timeout", str(timeout), drains=timeout > 0) as stop:
        assert all(stream.is_done for stream in stop.streams), stop.streams
        answer = stop.load.result(SECONDS)
        assert (answer.status_code, answer.json().get("name")) == ((503, None) if timeout == 0 else (200, "late"))
        ends = [stream.finish_reason for stream, begun in zip(stop.streams, stop.begun, strict=True) if begun]
        if timeout == 0:
            assert stop.seconds < SECONDS
            assert "abort" in ends, stop.streams
            assert set(ends) <= {"abort", "length"}
        else:
            assert set(ends) == {"length"}
            # Those that have not reached the engine are refused: by us, or by vLLM if it still reads their pictures.
            assert {stream.error for stream in stop.streams} <= {None, "503", "500"}
