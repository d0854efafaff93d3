"""The smoke run: the command, its preset, methods of every family, and servers of its own, which end with it."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import httpx
import psutil
import pytest

from benchmarks.research.continual.__main__ import parse
from benchmarks.research.continual.methods import METHODS
from tests.engine.parity import FEWER_PROCESSES
from tests.research.small_streams import killed_in_the_end, own_folder, wait_for

RUN = [sys.executable, "-m", "benchmarks.research.continual", "run", "--smoke"]
SECONDS = 800  # a hung run is ended; alone on two cores it takes less than 120


@pytest.fixture
def out(data, tmp_path) -> Path:
    """A folder with the data that a run would write there, but fewer."""
    shutil.copytree(data, tmp_path / "out" / "data")
    return tmp_path / "out"


@pytest.mark.slow
def test_the_smoke_run_ends_with_all_its_results(out):
    # Idle worker processes would take the cores from the training; the test below has a server as users start it.
    environment = {**os.environ, **FEWER_PROCESSES}
    done = subprocess.run([*RUN, "--out", str(out)], env=environment, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stderr
    options = vars(parse(["run", "--smoke", "--out", str(out)]))
    results = json.loads(done.stdout.splitlines()[-1])
    assert {row["method"] for row in results["results"]} == set(options["method"])
    assert results["answer"] == {"by": "http", "server": "own"}
    kinds = {METHODS[name].kind for name in options["method"]}
    assert kinds >= {"none", "bundle", "adapter", "gated_adapter", "exemplars", "copier"}
    for row in results["results"]:
        folder = own_folder(out, row["method"], budget=row["budget"])
        matrix = json.loads((folder / "matrix.json").read_bytes())
        assert matrix["complete"]
        answered = [len(path.read_text().splitlines()) for path in sorted(folder.glob("*/predictions.jsonl"))]
        assert answered == [questions["answered"] for questions in matrix["questions"]] == [6 + 9, 6 + 6 + 9]
        if row["method"] != "knn_copier":  # it answers with words of the tasks
            assert min(matrix["base"]) >= 0.5
    for log in ("server.log", "server-lora.log"):
        (url,) = set(re.findall(r"http://127\.0\.0\.1:\d+", (out / log).read_text()))
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{url}/health")


def test_a_run_that_is_killed_leaves_no_server(out):
    with killed_in_the_end([*RUN, "--method", "refined", "--out", str(out)]) as process:
        server = wait_for(lambda: server_of(process), process)
    psutil.wait_procs([server], timeout=60)
    assert not server.is_running()


def server_of(process: subprocess.Popen[bytes]) -> psutil.Process | None:
    """The run's server, as soon as it is there: what it does is of no matter."""
    children = psutil.Process(process.pid).children()
    return next((child for child in children if "server.launcher" in child.cmdline()), None)
