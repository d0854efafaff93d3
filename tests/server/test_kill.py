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

from benchmarks.server_process import processes_of, serving
from inducekv_vllm.bundle import read_bundle
from tests.inducekv_vllm.parity import World
from tests.server.http import Bundles, wait_until
from tests.server.launch import ENVIRONMENT, FLAGS

pytestmark = pytest.mark.slow


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
        server, *others = map(psutil.Process, processes_of(url))
        swapping = threading.Thread(target=swap, args=(url,))
        swapping.start()
        wait_until(lambda: len(acknowledged) >= 4 or not swapping.is_alive())
        assert len(acknowledged) >= 4
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
