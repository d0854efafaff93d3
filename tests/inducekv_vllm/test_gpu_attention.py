"""`test_runners.py` with the memory attention of GPUs, on both of vLLM's model runners, in processes of their own.

Triton's interpreter runs the kernels, and those of the V2 runner, which needs Triton when vLLM is imported.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.inducekv_vllm.kernels_on_cpu import WORKER_CLS

ROOT = Path(__file__).parents[2]
BACKEND = "tests.inducekv_vllm.triton_cpu"
TESTS = "tests/inducekv_vllm/test_runners.py"
# V1 prepares its rows by another adapter, which these tests cover; the rest does not depend on the runner.
V1_TESTS = "every_kind or one_token or took_part or left_behind"


def install(folder: Path) -> None:
    """Write a distribution whose entry point names the backend; Triton imports its modules `compiler` and `driver`."""
    package, facts = folder / "interpreted_cpu", folder / "interpreted_cpu-0.dist-info"
    package.mkdir()
    facts.mkdir()
    (package / "__init__.py").touch()
    (package / "compiler.py").write_text(f"from {BACKEND} import InterpreterBackend\n")
    (package / "driver.py").write_text(f"from {BACKEND} import InterpreterDriver\n")
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: interpreted-cpu\nVersion: 0\n")
    (facts / "entry_points.txt").write_text("[triton.backends]\ncpu = interpreted_cpu\n")


@pytest.mark.parametrize(("runner", "selected"), [("1", ""), ("0", V1_TESTS)], ids=["V2", "V1"])
def test_answers_are_those_of_transformers(tmp_path: Path, runner: str, selected: str) -> None:
    install(tmp_path)
    paths = [str(tmp_path), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "TRITON_INTERPRET": "1",
        "VLLM_USE_V2_MODEL_RUNNER": runner,
        "INDUCEKV_TEST_WORKER": WORKER_CLS,
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-s", "-k", selected, TESTS]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    assert ("Using V2 Model Runner" in run.stdout + run.stderr) == (runner == "1")
