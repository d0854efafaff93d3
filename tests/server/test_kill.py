"""kill -9 of a server or of its engine while bundles are swapped: the next server serves what was acknowledged last."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from pathlib import Path

import httpx
import psutil
import pytest

from benchmarks.server_process import serving
from inducekv_vllm.bundle import read_bundle
from tests.inducekv_vllm.parity import World
from tests.server.http import Bundles
from tests.server.launch import ENVIRONMENT, FLAGS

pytestmark = pytest.mark.slow


def processes_of(url: str) -> tuple[psutil.Process, list[psutil.Process]]:
    """The server that listens at this address, and its engine with its workers."""
    port = int(url.rpartition(":")[2])
    listening = (c for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN and c.laddr.port == port)
    server = psutil.Process(next(listening).pid)
    return server, server.children(recursive=True)


@pytest.mark.parametrize("victim", ["server", "engine"])
@pytest.mark.parametrize("seed", [0, 1])
def test_what_was_acknowledged_last_is_served_again(world: World, tmp_path: Path, victim: str, seed: int) -> None:
    names = ("sqrt", "prior", "other")
    digests = {name: read_bundle(world.paths[name]).digest for name in names}
    arguments = [str(world.model), "--served-model-name", "base", "--memory-root", str(world.paths["sqrt"].parent)]
    arguments += ["--memory-state", str(tmp_path / "state"), *FLAGS]
    acknowledged: list[str] = []
    asked: list[str] = []

    def swap(url: str) -> None:
        rng = random.Random(seed)
        try:
            while True:
                name = rng.choice([name for name in names if not asked or digests[name] != asked[-1]])
                asked.append(digests[name])
                answer = Bundles(url).load("m", world.paths[name], replace=True)
                if answer.status_code != 200:
                    return
                acknowledged.append(answer.json()["digest"])
        except httpx.TransportError:
            return

    with serving(arguments, tmp_path / "first.log", ENVIRONMENT) as url:
        server, others = processes_of(url)
        swapping = threading.Thread(target=swap, args=(url,))
        swapping.start()
        while len(acknowledged) < 4:
            time.sleep(0.01)
        time.sleep(random.Random(seed).uniform(0, 0.5))
        killed = [server] if victim == "server" else others
        for process in killed:
            os.kill(process.pid, signal.SIGKILL)
        swapping.join(timeout=120)
        assert not swapping.is_alive()
        for process in others:  # without its server an engine ends by itself, but not at once
            if process.is_running():
                process.kill()
    with serving(arguments, tmp_path / "second.log", ENVIRONMENT) as url:
        served = Bundles(url).cards()["m"]["digest"]
    # A change that was under way may have been recorded before its acknowledgement could be sent.
    assert served in {acknowledged[-1], asked[-1]}
    left = {path.stem for path in (tmp_path / "state").glob("*.safetensors")}
    assert served in left
    assert not list((tmp_path / "state").glob("*.tmp*"))
