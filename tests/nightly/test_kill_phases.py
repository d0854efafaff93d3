"""kill -9 in every phase of a version: the next server serves what was acknowledged last, and nothing else is left."""

import contextlib
import os
import signal
import sqlite3
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from benchmarks.server_process import processes_of, serving
from inducekv_vllm.attention.pool import ENTRY_TOKENS
from inducekv_vllm.bundle import Bundle, write_bundle
from inducekv_vllm.bundle.rows import rows_of
from tests.bundles import remade
from tests.engine.parity import EAGER, FEWER_PROCESSES, World
from tests.server.http import Bundles, wait_until
from tests.server.launch import ENVIRONMENT, FLAGS
from tests.server.ranks import HELD_ENTRY, HELD_UNLOADS, held_file

pytestmark = pytest.mark.slow
NAMES = ("m", "other", "another")  # the pool has room for two of them


class Killed:
    """A server that is killed, and started again on its state."""

    def __init__(self, world: World, folder: Path) -> None:
        self.world, self.folder, self.starts = world, folder, 0
        self.unloads = folder / "unloads"
        self.bundles = {name: self._written(name) for name in (*NAMES, "next")}
        self.names: dict[str, str] = {}  # what was acknowledged: the digest that each stands for
        self.stack, self.clients = ExitStack(), ThreadPoolExecutor(4)
        (folder / "tmp").mkdir()

    def _written(self, name: str) -> Bundle:
        """Its load waits while the worker is held."""
        bundle = remade(self.world.bundles["other"], settings={"name": name})
        first, *rest = bundle.metadata.entries
        bundle = remade(bundle, entries=(first.model_copy(update={"id": HELD_ENTRY}), *rest)) if name == "m" else bundle
        write_bundle(bundle, self.folder / f"{name}.safetensors")
        return bundle

    def start(self) -> None:
        G = self.world.heads_per_kv_head
        tokens = rows_of(self.bundles["next"].metadata, G) * G
        room = str(-(-2 * tokens // ENTRY_TOKENS))
        flags = [str(self.world.model), "--served-model-name", "base", *FLAGS, "--memory-pool-entries", room]
        flags += ["--memory-root", str(self.folder), "--memory-state", str(self.folder / "state")]
        flags += ["--worker-cls", "tests.server.ranks.HoldingWorker", "--memory-host-bytes", "0"]
        environment = {**ENVIRONMENT, **FEWER_PROCESSES, **EAGER, HELD_UNLOADS: str(self.unloads)}
        environment["TMPDIR"] = str(self.folder / "tmp")  # has the copies that workers read
        self.starts += 1
        self.url = self.stack.enter_context(serving(flags, self.folder / f"{self.starts}.log", environment))

    def load(self, name: str, content: str | None = None) -> None:
        content = content or name
        with self.going_on():
            answer = Bundles(self.url).load(name, f"{content}.safetensors", replace=True)
        assert answer.is_success, answer.text
        self.names[name] = answer.json()["digest"]

    def unload(self, name: str) -> None:
        assert Bundles(self.url).unload(name).is_success
        del self.names[name]

    def ask(self, name: str, tokens: int = 1) -> str:
        body = {"model": name, "prompt": "a", "max_tokens": tokens, "vllm_xargs": {"inducekv_trace": 1}}
        body |= {"ignore_eos": True}
        answer = httpx.post(f"{self.url}/v1/completions", json=body, timeout=120)
        assert answer.is_success, answer.text
        return str(answer.json()["kv_transfer_params"]["inducekv"]["digest"])

    def begin(self, name: str, tokens: int = 1) -> None:
        """A request that nobody waits for any more when the server is gone."""

        def ask() -> None:
            with contextlib.suppress(httpx.TransportError):
                self.ask(name, tokens)

        self.clients.submit(ask)

    @contextlib.contextmanager
    def going_on(self) -> Iterator[None]:
        """No load is held longer than a moment."""
        is_done = threading.Event()

        def let_go() -> None:
            while not is_done.wait(0.05):
                for path in self.folder.glob("**/*.held"):
                    path.unlink(missing_ok=True)

        thread = threading.Thread(target=let_go)
        thread.start()
        try:
            yield
        finally:
            is_done.set()
            thread.join()

    def resident(self) -> set[str]:
        return {name for name, card in Bundles(self.url).cards().items() if card["is_resident"]}

    def is_held(self) -> bool:
        """Whether the worker has been asked for what it holds."""
        return bool([*self.folder.glob("**/*.held")])

    def reach(self, phase: str) -> None:
        with self.going_on():
            for name in NAMES:
                self.load(name)
            for name in ("other", "another") if phase in ("cold", "coming") else ("m", "another"):
                self.ask(name)
        assert ("m" in self.resident()) == (phase not in ("cold", "coming"))
        if phase == "coming":
            self.begin("m")
            wait_until(self.is_held)
        if phase in ("used", "draining"):
            self.begin("m", tokens=200)
            wait_until(lambda: Bundles(self.url).cards()["m"]["active_requests"] == 1)
        if phase == "draining":
            self.unload("m")
        if phase == "replaced":
            self.begin("m", tokens=200)
            self.load("m", "next")
        if phase == "leaving":
            self.unloads.touch()
            self.begin("other")
            wait_until(held_file(self.unloads).exists)

    def kill(self) -> None:
        for process in processes_of(self.url):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        self.stack.close()
        for path in [self.unloads, *self.folder.glob("**/*.held")]:
            path.unlink(missing_ok=True)

    def check(self) -> None:
        cards = Bundles(self.url).cards()
        assert {name: card["digest"] for name, card in cards.items()} == self.names
        assert self.resident() == set()
        with self.going_on():
            for name in (*self.names, *self.names):
                assert self.ask(name) == self.names[name]
        answer = httpx.post(f"{self.url}/collective_rpc", json={"method": "inducekv_stats"}, timeout=60).json()
        assert set(answer["results"][0]["resident"]) == {self.names[name] for name in self.resident()}
        with contextlib.closing(sqlite3.connect(self.folder / "state")) as kept:
            assert kept.execute("PRAGMA integrity_check").fetchone() == ("ok",)
            assert {digest for (digest,) in kept.execute("SELECT digest FROM contents")} >= set(self.names.values())
        assert not [*self.folder.glob(".*.tmp")]


@pytest.fixture(scope="module")
def killed(world: World, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Killed]:
    killed = Killed(world, tmp_path_factory.mktemp("killed"))
    killed.start()
    yield killed
    killed.stack.close()
    killed.clients.shutdown()


@pytest.mark.parametrize("phase", ["cold", "coming", "resident", "used", "replaced", "draining", "leaving"])
def test_what_was_acknowledged_last_is_served_again(killed: Killed, phase: str) -> None:
    killed.reach(phase)
    killed.kill()
    killed.start()
    killed.check()
