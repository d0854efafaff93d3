"""The kernels' benchmark as far as it runs without a GPU: results, bytes, operations, targets, plot, machine code."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from benchmarks.geometries import GEOMETRIES, LATENT_GEOMETRIES
from benchmarks.kernels import attention, rivals
from benchmarks.kernels.rivals import Inputs
from benchmarks.kernels.run import SECTIONS
from benchmarks.kernels.workloads import Case, build

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
ROOT = Path(__file__).parents[3]
TINY = GEOMETRIES["tiny"]
# What the project needs beside torch, triton and numpy, and a machine with a GPU may lack.
ABSENT = (
    *("vllm", "faiss", "pydantic", "transformers", "safetensors", "fastapi", "jinja2", "matplotlib", "PIL", "rich"),
    *("cachetools", "inducekv_vllm.bundle", "inducekv_vllm.attention.resident_bundle", "selector", "server"),
)


def test_the_benchmark_needs_torch_triton_and_numpy_alone(tmp_path: Path) -> None:
    """Its imports, and all of its sections in the interpreter."""
    output = tmp_path / "kernels.json"
    arguments = ["--geometry", "tiny", "--device", "interpreter", "--dtype", "float32", "--output", str(output)]
    code = f"""
import sys, runpy
sys.modules.update(dict.fromkeys({ABSENT!r}))
sys.argv[1:] = {arguments!r}
runpy.run_module("benchmarks.kernels.run", run_name="__main__")
"""
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    result = json.loads(output.read_text())
    assert result == json.loads(ran.stdout)
    assert result["right"]
    for section in SECTIONS:
        assert result[section]
        assert all(row["right"] for row in result[section])
    assert max(row["deviation"] for row in result["attention"]) < 2e-6
    assert {row["launches"] for row in result["attention"]} == {1, 2}
    assert [row["rows_with_memory"] > 0 for row in result["replay"]] == [False, True, True]
    for case in rivals.small_cases():
        found = {row["rival"]: row for row in result["rivals"] if row["case"] == case.name}
        assert list(found) == list(rivals.RIVALS)
        assert {name for name, row in found.items() if "deviation" in row} == {"concatenated", "copied"}
    assert "peaks" not in result  # nothing is timed


@pytest.mark.parametrize("name", ["concatenated", "copied"])
def test_a_wrong_rival_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare = rivals.RIVALS[name]

    def wrong(inputs: Inputs) -> Callable[[int], torch.Tensor]:
        run = prepare(inputs)
        return lambda layer: run(layer) * 1.01

    monkeypatch.setattr(rivals, "RIVALS", {name: wrong})
    for row in rivals.measure(TINY, torch.float32, "cpu", print, timed=False):
        assert not row["right"]
        assert "error" not in row


def test_a_wrong_kernel_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "small_cases", lambda: [Case("decode", 1, 2, "merged")])
    monkeypatch.setattr(attention.Workload, "add_memory", lambda self, output, layer=0: output.mul_(1.01))
    (row,) = attention.measure(TINY, torch.float32, "cpu", None, print)
    assert not row["right"]


def test_bytes_and_operations_of_a_step() -> None:
    """H = 6, J = 2, D = 64; 3 requests with 2 memories of 2 entries of 8 tokens, in float16."""
    merged = build(Case("decode", 3, 2, "merged", page_sets=2), TINY, torch.float16, "cpu")
    pages, rows, terms, indices = 2 * 2 * 16 * 64 * 2 * 2, 3 * 6 * (3 * 64 * 2 + 4), 3 * 16 * 3 * 4, 3 * 16 * 4
    assert merged.bytes == pages + rows + terms + indices
    assert merged.operations == 2 * 2 * 3 * 6 * 16 * 64
    mapped = build(Case("prefill", 5, 2, "decoupled", map_rows=3), TINY, torch.float16, "cpu")
    pages, maps, rows = 2 * 16 * 64 * 2 * 2, 3 * 6 * 64 * 2 * 2, 5 * 6 * 3 * 64 * 2
    assert mapped.bytes == pages + maps + rows + 3 * 4 + 3 * 4
    assert mapped.operations == 2 * 2 * 5 * 6 * 64 * (16 + 3)


def _compiled(*arguments: str) -> list[str]:
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.kernels.compiled", *arguments]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr + ran.stdout
    return ran.stdout.splitlines()


def test_the_kernels_compile_for_a_gpu() -> None:
    """To machine code for an H100, with real bfloat16 products; the assembler comes with Triton."""
    lines = _compiled("--geometry", "tiny", "--rows", "1", "--forms", "merged")
    assert [re.split(r", |: ", line)[4] for line in lines] == ["in a graph", "by itself", "by itself"]  # short, long


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("capability", ["80", "89", "90", "100", "120"])
def test_latents_compile_for_a_gpu(capability: str, dtype: str) -> None:
    """A key of 576 and a value of 512 fit every GPU, and little spills."""
    arguments = ["--geometry", *LATENT_GEOMETRIES, "--capability", capability, "--dtype", dtype, "--most-spilled", "64"]
    assert _compiled(*arguments)


@pytest.mark.slow
def test_nothing_spills_at_the_sizes_of_qwen3_vl() -> None:
    """On an H100; but for two registers of prompts with maps."""
    assert _compiled("--geometry", "qwen3-vl-4b", "--most-spilled", "8")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("capability", ["80", "89", "90", "100", "120"])
def test_every_variant_compiles_for_a_gpu(capability: str, dtype: str) -> None:
    arguments = ["--geometry", *GEOMETRIES, "--capability", capability, "--dtype", dtype]
    assert _compiled(*arguments)
