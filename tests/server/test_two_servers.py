"""Two servers on one host, published to by one command; one of them is killed and comes back."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import httpx
import psutil
import pytest

from benchmarks.server_process import processes_of, starting
from inducekv_vllm.bundle import read_bundle
from inducekv_vllm.host.config import ADMIN_KEY_VARIABLE
from selector.cli.bundle import main
from tests.inducekv_vllm.parity import FEWER_PROCESSES, World
from tests.server.http import Bundles, wait_until
from tests.server.launch import ADMIN_KEY, ENVIRONMENT, FLAGS

pytestmark = pytest.mark.slow


def kill(url: str) -> None:
    server, *others = map(psutil.Process, processes_of(url))
    os.kill(server.pid, signal.SIGKILL)
    wait_until(lambda: not server.is_running() or server.status() == psutil.STATUS_ZOMBIE)
    for process in others:  # vLLM's engine does not see that its server is gone
        if process.is_running():
            process.kill()


def status_of(url: str, model: str) -> int:
    body = {"model": model, "prompt": "yes no", "max_tokens": 1}
    return httpx.post(f"{url}/v1/completions", json=body, timeout=60).status_code


def test_publish_to_two_servers_of_which_one_is_killed(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(ADMIN_KEY_VARIABLE, ADMIN_KEY)
    old, new = (read_bundle(world.paths[name]).digest for name in ("sqrt", "prior"))

    def publish(name: str, *urls: str, check: bool = False) -> tuple[int, list[str], list[str]]:
        to = [part for url in urls for part in ("--to", url)]
        options = ["--check"] if check else []
        status = main(["publish", str(world.paths[name]), "--name", "m", *options, *to])
        shown = capsys.readouterr()
        return status, shown.out.splitlines(), shown.err.splitlines()

    def arguments(server: str) -> list[str]:
        root = ["--memory-root", str(world.paths["sqrt"].parent), "--memory-state", str(tmp_path / server)]
        return [str(world.model), "--served-model-name", "base", *root, *FLAGS]

    environment = {**ENVIRONMENT, **FEWER_PROCESSES}
    with (
        starting(arguments("a"), tmp_path / "a.log", environment) as a_is_healthy,
        starting(arguments("b"), tmp_path / "b.log", environment) as b_is_healthy,
    ):
        a, b = a_is_healthy(), b_is_healthy()
        assert publish("sqrt", a, b) == (0, [f"{url}: m was -, is {old}" for url in (a, b)], [])
        kill(b)
        # The one that is there has the new version, and the command says which one has not.
        status, served, errors = publish("prior", b, a)
        assert (status, served) == (1, [f"{a}: m was {old}, is {new}"])
        assert errors[0].startswith(f"{b}: what it serves is unknown: {b}/v1/memory_bundles cannot be reached")
        assert errors[1:] == [f"1 of 2 servers do not serve {new}: {b}"]
        with starting(arguments("b"), tmp_path / "again.log", environment) as b_is_healthy_again:
            b = b_is_healthy_again()
            # It is back with what it has acknowledged last, and does not answer for another version.
            behind = [f"{a}: m was {new}, is {new}", f"{b}: m was {old}, is {old}"]
            assert publish("prior", a, b, check=True) == (1, behind, [f"1 of 2 servers do not serve {new}: {b}"])
            assert [status_of(url, f"m@{new}") for url in (a, b)] == [200, 404]
            assert publish("prior", a, b) == (0, [behind[0], f"{b}: m was {old}, is {new}"], [])
            assert [status_of(url, f"m@{new}") for url in (a, b)] == [200, 200]
            assert [Bundles(url).cards()["m"]["digest"] for url in (a, b)] == [new, new]
