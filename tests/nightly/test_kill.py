"""kill -9 while bundles are swapped: of a server, its engine core, or a worker.

The next server serves what was acknowledged last.
"""

import contextlib
import json
import os
import random
import signal
import sqlite3
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import httpx
import openai
import psutil
import pytest

from benchmarks.server_process import processes_of, serving
from inducekv_vllm.bundle import read_bundle
from tests.engine.parity import TOLERANCE, World, make_world, text_prompts
from tests.server.http import Bundles, ask, deviation, wait_until
from tests.server.launch import ENVIRONMENT, FLAGS, process_of
from tests.tiny_families import LATENT_FAMILIES, ON_CPUS
from tests.tiny_hybrids import save_lfm2

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
    killed_while_swapping(world, tmp_path, victim, seed)


@pytest.mark.parametrize(
    ("save", "options"),
    [(save_lfm2, ()), (LATENT_FAMILIES["deepseek-v3"], ("--attention-backend", ON_CPUS["attention_backend"]))],
)
def test_of_a_hybrid_and_of_latents(save: Callable[[Path], Path], options: tuple[str, ...], tmp_path: Path) -> None:
    world = make_world(save(tmp_path / "model"), tmp_path, make_prompts=text_prompts)
    options += ("--compilation-config", json.dumps(ON_CPUS["compilation_config"]))
    killed_while_swapping(world, tmp_path, "EngineCore", 0, options)


def killed_while_swapping(world: World, tmp_path: Path, victim: str, seed: int, options: Sequence[str] = ()) -> None:
    """An answer of the next server, with the memory that it finds, is transformers'."""
    state, log = tmp_path / "state", tmp_path / "first.log"
    flags = [*arguments(world, state), *options]
    with serving(flags, log, ENVIRONMENT) as url:
        others = [psutil.Process(each) for each in processes_of(url)[1:]]
        swapping = Swapping(world, url, seed)
        os.kill(process_of(log, victim), signal.SIGKILL)
        swapping.ends()
        for process in others:  # without its server an engine ends by itself, but not at once
            with contextlib.suppress(psutil.NoSuchProcess):  # it may end at any moment
                process.kill()
    (prompt,) = text_prompts(1, 1)
    with serving(flags, tmp_path / "second.log", ENVIRONMENT) as url:
        served = Bundles(url).cards()["m"]["digest"]
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=600)
        bundle = next(each for each in world.bundles.values() if each.digest == served)
        assert deviation(world, ask(client, "m", prompt), prompt, bundle) <= TOLERANCE
    # A change that was under way may have been recorded before its acknowledgement could be sent.
    assert served in {swapping.acknowledged[-1], swapping.asked[-1]}
    with contextlib.closing(sqlite3.connect(state)) as found:
        assert found.execute("SELECT bundle FROM contents WHERE digest = ?", (served,)).fetchone() != (None,)
        assert found.execute("PRAGMA integrity_check").fetchone() == ("ok",)
