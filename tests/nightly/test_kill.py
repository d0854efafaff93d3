"""kill -9 while bundles are swapped: of a server, its engine core, or a worker.

The next server serves what was acknowledged last.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sqlite3
import threading
import time
from pathlib import Path

import httpx
import psutil
import pytest

from benchmarks.server_process import processes_of, serving
from inducekv_vllm.bundle import read_bundle
from tests.engine.parity import World
from tests.server.http import Bundles, wait_until
from tests.server.launch import ENVIRONMENT, FLAGS, process_of

pytestmark = pytest.mark.slow
NAMES = ("first", "second", "other")


class Swapping:
    """Lets the name "m" stand for one bundle after the other, until the server is gone."""

    def __init__(self, world: World, url: str, seed: int) -> None:
        self.world, self.url = world, url
        self.digests = {name: read_bundle(world.paths[name]).digest for name in NAMES}
        self.acknowledged: list[str] = []
        self.asked: list[str] = []
        self._random = random.Random(seed)
        self._thread = threading.Thread(target=self._swap)
        self._thread.start()
        wait_until(lambda: len(self.acknowledged) >= 4 or not self._thread.is_alive())
        assert len(self.acknowledged) >= 4
        time.sleep(self._random.uniform(0, 0.5))

    def next(self) -> str:
        """Another bundle than the one that was asked for last."""
        name = self._random.choice([name for name in NAMES if not self.asked or self.digests[name] != self.asked[-1]])
        self.asked.append(self.digests[name])
        return name

    def _swap(self) -> None:
        try:
            while (answer := Bundles(self.url).load("m", self.world.paths[self.next()], replace=True)).is_success:
                self.acknowledged.append(answer.json()["digest"])
        except httpx.TransportError:
            pass

    def ends(self) -> None:
        self._thread.join(timeout=120)
        assert not self._thread.is_alive()


def arguments(world: World, state: Path) -> list[str]:
    root = ["--memory-root", str(world.paths["first"].parent)]
    return [str(world.model), "--served-model-name", "base", *root, "--memory-state", str(state), *FLAGS]


@pytest.mark.parametrize(
    ("victim", "seed"), [("APIServer", 0), ("APIServer", 1), ("EngineCore", 0), ("EngineCore", 1), ("Worker", 0)]
)
def test_what_was_acknowledged_last_is_served_again(world: World, tmp_path: Path, victim: str, seed: int) -> None:
    state, log = tmp_path / "state", tmp_path / "first.log"
    with serving(arguments(world, state), log, ENVIRONMENT) as url:
        others = [psutil.Process(each) for each in processes_of(url)[1:]]
        swapping = Swapping(world, url, seed)
        os.kill(process_of(log, victim), signal.SIGKILL)
        swapping.ends()
        for process in others:  # without its server an engine ends by itself, but not at once
            if process.is_running():
                process.kill()
    with serving(arguments(world, state), tmp_path / "second.log", ENVIRONMENT) as url:
        served = Bundles(url).cards()["m"]["digest"]
    # A change that was under way may have been recorded before its acknowledgement could be sent.
    assert served in {swapping.acknowledged[-1], swapping.asked[-1]}
    with contextlib.closing(sqlite3.connect(state)) as found:
        assert found.execute("SELECT bundle FROM contents WHERE digest = ?", (served,)).fetchone() != (None,)
        assert found.execute("PRAGMA integrity_check").fetchone() == ("ok",)
