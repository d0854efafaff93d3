"""Runs `inducekv-serve` on a free local port and always stops it, even if this process is killed."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import psutil

START_SECONDS = 600.0  # the first start compiles the model
STOP_SECONDS = 30.0
PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
_LIBC = ctypes.CDLL(None, use_errno=True)  # loaded here: between fork and exec a child must load nothing


class ServerFailed(RuntimeError):
    """The server ended or did not answer in time; the message ends with lines of its log."""


@contextmanager
def reserved_port() -> Iterator[int]:
    """A free local port that no other process is given while the block runs.

    A server takes a minute from its command line to its socket; in that time the kernel would hand out a port that is
    merely free. One that a socket is bound to stays ours, and vLLM, which binds with SO_REUSEADDR, can listen there.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield int(holder.getsockname()[1])


@contextmanager
def serving(arguments: Sequence[str], log: Path, environment: dict[str, str] | None = None) -> Iterator[str]:
    """Run `inducekv-serve *arguments` and yield its base URL, "http://127.0.0.1:PORT", once it is healthy."""
    with starting(arguments, log, environment) as wait_until_healthy:
        yield wait_until_healthy()


@contextmanager
def starting(
    arguments: Sequence[str],
    log: Path,
    environment: dict[str, str] | None = None,
    module: str = "server.launcher",
    program: Sequence[str] = (),
) -> Iterator[Callable[..., str]]:
    """Start `inducekv-serve *arguments` and yield a function that waits until it is healthy and returns its base URL.

    That function takes the seconds to wait (default: START_SECONDS). It raises ServerFailed if the server does not
    become healthy, and stops it. `module` is that of another server, `program` another server's command.
    """
    with reserved_port() as port, log.open("wb") as output:
        command = [*(program or (sys.executable, "-m", module)), *arguments, "--host", "127.0.0.1", "--port", str(port)]
        before = signal.signal(signal.SIGTERM, _exit)
        # In a session of its own, so that Ctrl-C reaches only this process, which then stops the server and its engine.
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, **(environment or {})},
            preexec_fn=partial(end_with_parent, signal.SIGTERM),
        )
        try:
            yield partial(_wait_until_healthy, process, f"http://127.0.0.1:{port}", log)
        finally:
            _stop(process)
            signal.signal(signal.SIGTERM, before)


def processes_of(url: str) -> list[int]:
    """The process that this one has started and that listens at an address, and its engine and workers."""
    port = urlsplit(url).port
    for process in psutil.Process().children(recursive=True):
        listening = [each for each in process.net_connections() if each.status == psutil.CONN_LISTEN]
        if port in {each.laddr.port for each in listening}:
            return [process.pid, *(child.pid for child in process.children(recursive=True))]
    raise AssertionError(f"no process listens at {url}")


def end_with_parent(number: signal.Signals = signal.SIGKILL) -> None:
    """Sends this signal to the calling process when its parent's thread ends, however it ends (Linux)."""
    _LIBC.prctl(PR_SET_PDEATHSIG, int(number))


def _exit(number: int, frame: object) -> None:
    """Turn SIGTERM into an exception, so that every `finally` runs and stops the server."""
    sys.exit(128 + number)


def _wait_until_healthy(process: subprocess.Popen[bytes], url: str, log: Path, seconds: float = START_SECONDS) -> str:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise ServerFailed(
                f"the server ended with exit status {process.returncode}; from its log:\n{reason_in(log)}"
            )
        try:
            if httpx.get(f"{url}/health", timeout=5).status_code == 200:
                return url
        except httpx.TransportError:
            pass
        time.sleep(0.5)
    _stop(process)
    raise ServerFailed(f"the server did not answer within {seconds:.0f} s; from its log:\n{reason_in(log)}")


def _stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(STOP_SECONDS)
    # The engine is a child of the server and outlives its crash; the process group holds only these two.
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def reason_in(log: Path) -> str:
    """The log's lines that name an error (another process often logs the cause early), and its last lines."""
    lines = log.read_text(errors="replace").splitlines()
    named = dict.fromkeys(line for line in lines if re.search(r"\w(Error|Exception|Model|error): ", line))
    return "\n".join([*list(named)[-6:], "...", *lines[-15:]])
