"""`test_runners.py` on vLLM's V2 model runner, in a process of its own: it needs Triton when vLLM is imported.

On the CPU, Triton's interpreter runs that runner's kernels.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
BACKEND = "tests.inducekv_vllm.triton_cpu"


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


def test_the_v2_runner_does_what_the_v1_runner_does(tmp_path: Path) -> None:
    install(tmp_path)
    paths = [str(tmp_path), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "TRITON_INTERPRET": "1",
        "VLLM_USE_V2_MODEL_RUNNER": "1",
    }
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-s",
        "tests/inducekv_vllm/test_runners.py",
    ]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "Using V2 Model Runner" in run.stdout + run.stderr
