"""Tests of engines again, with the memory attention of GPUs, in processes of their own.

Triton's interpreter runs the kernels, and those of vLLM's V2 model runner, which needs Triton when vLLM is imported.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engine.kernels_on_cpu import KernelsAroundCPUAttention, KernelsAroundFlashAttention
from tests.engine.parity import EAGER, WORKER_VARIABLE

ROOT = Path(__file__).parents[2]
BACKEND = "tests.engine.triton_cpu"
RUNNERS, KINDS, DRAFTS = "test_runners.py", "test_decoupled_attention_kinds.py", "test_speculation.py"
HEADS = "not ngrams and not dflash and not deepseek and not lite"
FACTS, LATENTS, TWO = "test_facts.py", "test_latents.py", "test_two_memories.py"


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


@pytest.mark.parametrize(
    ("worker", "runner", "tests", "selected"),
    [
        # One process for both: it takes longer to begin than the second.
        (KernelsAroundFlashAttention, "1", (RUNNERS, FACTS), "runners or alone"),
        # V1 tells the rows of a step by another adapter, and nothing else depends on the runner: test_runners.py by
        # itself runs with that adapter.
        pytest.param(KernelsAroundFlashAttention, "0", (RUNNERS,), "", marks=pytest.mark.slow),
        # The memory attention of CPUs, on the runner that they will have once V1 is gone.
        pytest.param(None, "1", (RUNNERS,), "", marks=pytest.mark.slow),
        # Another backend: sinks and sliding windows, without a log-sum-exp, as in test_decoupled_attention_kinds.py by
        # itself; attention/test_kernel_memory.py has the kernels around any backend.
        pytest.param(KernelsAroundCPUAttention, "1", (KINDS,), "sinks", marks=pytest.mark.slow),
        pytest.param(KernelsAroundCPUAttention, "1", (LATENTS,), "not refused", marks=pytest.mark.slow),
        pytest.param(KernelsAroundFlashAttention, "1", (TWO,), "", marks=pytest.mark.slow),
        pytest.param(KernelsAroundFlashAttention, "1", (DRAFTS,), HEADS, marks=pytest.mark.slow),
        # vLLM's kernel for draft models on V1 takes a bool, which Triton's interpreter does not.
        pytest.param(
            KernelsAroundFlashAttention, "0", (DRAFTS,), f"{HEADS} and not draft_model", marks=pytest.mark.slow
        ),
    ],
    ids=["V2", "V1", "CPU's on V2", "another backend", "latents", "two memories", "drafts on V2", "drafts on V1"],
)
def test_answers_are_those_of_transformers(
    tmp_path: Path, worker: type | None, runner: str, tests: tuple[str, ...], selected: str
) -> None:
    install(tmp_path)
    paths = [str(tmp_path), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {
        **os.environ,
        **EAGER,
        "PYTHONPATH": os.pathsep.join(paths),
        "TRITON_INTERPRET": "1",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "VLLM_USE_V2_MODEL_RUNNER": runner,
    }
    if worker is not None:
        environment[WORKER_VARIABLE] = f"{worker.__module__}.{worker.__name__}"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-s", "-k", selected]
    command += [f"tests/engine/{each}" for each in tests]
    command += ["-m", "slow or not slow"] if tests == (DRAFTS,) else []
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    assert ("Using V2 Model Runner" in run.stdout + run.stderr) == (runner == "1")
