"""The kernels' benchmark as far as it runs without a GPU: results, bytes, operations, targets, plot, machine code."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.geometries import GEOMETRIES
from benchmarks.kernels import attention, layers, plot, rivals, targets
from benchmarks.kernels.rivals.inputs import Inputs, Rival
from benchmarks.kernels.run import SECTIONS, parse_arguments
from benchmarks.kernels.self_attention import attend
from benchmarks.kernels.timing import Peaks
from benchmarks.kernels.workloads import Case, build, plan_of
from inducekv_vllm.attention.kernel_memory import KernelMemoryAttention
from inducekv_vllm.attention.kernel_step import rows_with_memory
from inducekv_vllm.attention.kernel_tables import KernelTables
from inducekv_vllm.attention.kernels.geometry import MemoryRows
from inducekv_vllm.attention.kernels.tiles import Processors
from inducekv_vllm.attention.pool import MemoryPool, PoolShape
from inducekv_vllm.attention.request_table import MemoryOfRequests
from inducekv_vllm.host.config import DEFAULT_POOL_ENTRIES
from tests.inducekv_vllm.attention.pools import CPU, full_attention

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
ROOT = Path(__file__).parents[2]
TINY = GEOMETRIES["tiny"]
PEAKS = Peaks(bytes_per_second=4e12, operations_per_second=8e14, launch_us=1.5)
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
    assert "peaks" not in result  # nothing is timed, so nothing can be met or missed
    assert result["targets"] == []


def test_cuda_without_a_device_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["run", "--geometry", "tiny", "--device", "cuda"])
    with pytest.raises(SystemExit):
        parse_arguments()
    assert "needs a CUDA device, and PyTorch finds none" in capsys.readouterr().err


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Small cases on the timed paths; a clock that runs each call once and says 100 us, whatever it was.

    Returns how many calls each measurement had.
    """
    calls_timed: list[int] = []

    def microseconds(calls: Sequence[Callable[[], object]]) -> float:
        calls_timed.append(len(calls))
        for call in calls:
            call()
        return 100.0

    for module in (attention, layers, rivals):
        monkeypatch.setattr(module, "microseconds", microseconds)
    decode, prefill = Case("decode", 1, 2, "merged"), Case("prefill", 2, 2, "decoupled")
    monkeypatch.setattr(attention, "cases", lambda: [decode, prefill])
    monkeypatch.setattr(attention, "MOST_LAYERS", 2)
    monkeypatch.setattr(layers, "cases", lambda: [decode])
    monkeypatch.setattr(rivals, "cases", rivals.small_cases)
    for module in (layers, rivals):
        monkeypatch.setattr(module, "CONTEXT", 16)
    monkeypatch.setattr(rivals, "LAYERS", 2)
    return calls_timed


def test_timed_sections_report_times_and_shares(clock: list[int]) -> None:
    timed = attention.measure(TINY, torch.float32, "cpu", PEAKS, print)
    assert [row["us"] for row in timed] == [100.0, 100.0]
    for row in timed:
        assert row["roofline_us"] == PEAKS.roofline_us(row["bytes"], row["operations"])
        assert row["of_roofline"] == row["roofline_us"] / 100.0
        assert row["of_roofline_or_launch"] == PEAKS.launch_us / 100.0 > row["of_roofline"]
    whole = layers.measure(TINY, torch.float32, "cpu", print, timed=True)
    assert [(row["plain_us"], row["memory_us"], row["speed"]) for row in whole] == [(100.0, 100.0, 1.0)]
    against = rivals.measure(TINY, torch.float32, "cpu", print, timed=True)
    assert all(row["right"] and row["us"] == 100.0 for row in against)
    assert clock == [2, 2, 1, 1, *[2] * len(against)]


@pytest.mark.parametrize("name", ["concatenated", "copied"])
def test_a_wrong_rival_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare = rivals.RIVALS[name]

    def wrong(inputs: Inputs) -> Rival:
        rival = prepare(inputs)
        return replace(rival, run=lambda layer: rival.run(layer) * 1.01)

    monkeypatch.setattr(rivals, "RIVALS", {name: wrong})
    for row in rivals.measure(TINY, torch.float32, "cpu", print, timed=False):
        assert not row["right"]
        assert "error" not in row


def test_rows_see_the_tokens_up_to_their_own() -> None:
    """What stands in front of a prompt is seen by each of its rows."""
    g = torch.Generator().manual_seed(0)
    query, keys, values = (torch.randn(2, tokens, 3, 16, generator=g) for tokens in (4, 7, 7))
    output, lse = attend(query, keys, values, causal=True, scale=0.25)
    for row in range(4):
        seen = slice(None, 7 - 3 + row)
        expected = attend(query[:, row : row + 1], keys[:, seen], values[:, seen], causal=False, scale=0.25)
        assert torch.allclose(output[:, row : row + 1], expected[0], atol=1e-6)
        assert torch.allclose(lse[:, row : row + 1], expected[1], atol=1e-6)


def test_a_rival_that_fails_is_named(clock: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_: Inputs) -> Rival:
        raise RuntimeError("out of registers")

    monkeypatch.setattr(rivals, "RIVALS", {"copied": fails})
    rows = rivals.measure(TINY, torch.float32, "cpu", print, timed=True)
    assert [row["case"] for row in rows] == [case.name for case in rivals.small_cases()]
    for row in rows:
        assert not row["right"]
        assert row["error"] == "RuntimeError: out of registers"


def test_a_wrong_kernel_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "small_cases", lambda: [Case("decode", 1, 2, "merged")])
    monkeypatch.setattr(attention.Workload, "add_memory", lambda self, output, layer=0: output.mul_(1.01))
    (row,) = attention.measure(TINY, torch.float32, "cpu", None, print)
    assert not row["right"]


def test_bytes_and_operations_of_a_step() -> None:
    """H = 6, J = 2, D = 64; 3 requests with 2 memories of 2 entries of 8 tokens, in float16."""
    merged = build(Case("decode", 3, 2, "merged", page_sets=2), TINY, torch.float16, "cpu")
    pages, rows, terms, indices = 2 * 2 * 16 * 64 * 2 * 2, 3 * 6 * (3 * 64 * 2 + 4), 3 * 16 * 3 * 4, 2 * 16 * 4
    assert merged.bytes == pages + rows + terms + indices
    assert merged.operations == 2 * 2 * 3 * 6 * 16 * 64
    mapped = build(Case("prefill", 5, 2, "decoupled", map_rows=3), TINY, torch.float16, "cpu")
    pages, maps, rows = 2 * 16 * 64 * 2 * 2, 3 * 6 * 64 * 2 * 2, 5 * 6 * 3 * 64 * 2
    assert mapped.bytes == pages + maps + rows + (16 * 3 + 3) * 4 + (16 + 3) * 4
    assert mapped.operations == 2 * 2 * 5 * 6 * 64 * (16 + 3)


H200 = Processors(132, 227 * 1024)


@pytest.mark.parametrize("name", ["qwen3-vl-4b", "llava-1.5-7b", "qwen2.5-vl-7b"])
def test_the_launches_are_those_of_the_engine(name: str) -> None:
    """Of its default pool, beside FlashAttention: what graphs were captured with, and the steps of prompts."""
    g = GEOMETRIES[name]
    shape = PoolShape(DEFAULT_POOL_ENTRIES, 1, g.kv_heads, g.heads_per_kv_head, g.head_size)
    tables, pool = KernelTables(1, DEFAULT_POOL_ENTRIES, 1, CPU), MemoryPool(shape, torch.bfloat16, CPU)
    model: Any = SimpleNamespace(is_mm_prefix_lm=False, rswa_window=None)
    engine = KernelMemoryAttention(pool, tables, MemoryOfRequests(1, tables.write), CPU, model, H200, 256)
    engine.attach(full_attention(), {}, [])
    for case in {*attention.cases(), *layers.cases()}:
        found, plan = plan_of(case, g, torch.bfloat16, H200)
        assert {type(constant) for constant in found.kind} == {int, bool}  # Triton compiles for no others
        if case.phase == "decode":
            captured = engine._graphs.launch(case.rows)
            assert found == captured.shape
            assert found.maps
            assert found.lse
            engine._graphs.write(case.rows, _engine_rows(case))
            for own, array in zip(captured.tensors.plan, plan.arrays(), strict=True):
                assert np.array_equal(own.numpy(), array)
        else:
            assert found == engine._geometry.of_step(_engine_rows(case))


def _engine_rows(case: Case) -> MemoryRows:
    """By the engine's function: a request with `rows` tokens of a prompt, or as many requests with one row each."""
    bundle: Any = SimpleNamespace(map_rank=case.map_rows, form=case.form)
    requests = case.rows if case.phase == "decode" else 1
    memories: list[Any] = [
        SimpleNamespace(slot=n + 1, reads=(0, bytes([n % case.page_sets])), num_tokens=case.tokens, bundle=bundle)
        for n in range(requests)
    ]
    rows = rows_with_memory(memories, [0] * requests, [0] * requests, [case.rows // requests] * requests)
    assert rows is not None
    return rows


def test_every_size_of_the_issue_is_measured() -> None:
    cases = list(attention.cases())
    assert len({case.name for case in cases}) == len(cases)
    for form in ("merged", "decoupled"):
        sizes = {(case.phase, case.rows, case.entries) for case in cases if case.form == form}
        steps = [("decode", n) for n in (1, 64, 256)] + [("prefill", n) for n in (512, 2048, 8192)]
        assert sizes >= {(*step, entries) for step in steps for entries in (4, 32, 256, 512)}
    assert any(case.map_rows for case in cases)
    assert any(case.page_sets > 1 for case in cases)


def _result() -> dict[str, Any]:
    measured = {"phase": "decode", "right": True, "bytes": 8_000_000, "operations": 32_000_000}
    return {
        "geometry": "qwen3-vl-4b",
        "dtype": "bfloat16",
        "machine": {"gpu": "a GPU"},
        "peaks": PEAKS.as_dict(),
        "attention": [
            {"case": "decode 1, B = 256, merged", "us": 2.5, "of_roofline": 0.8, **measured},
            {"case": "prefill 512, B = 4, merged", "us": 10.0, "of_roofline": 0.2, **measured, "phase": "prefill"},
        ],
        "layers": [
            {"case": "decode 1, B = 256, merged", "right": True, "speed": 0.96},
            {"case": "decode 1, B = 32, merged", "right": True, "speed": 0.97},
            {"case": "prefill 2048, B = 256, merged", "right": True, "speed": 0.87},
            {"case": "decode 16, B = 256, merged", "right": True, "speed": 0.1},  # nobody asked for this size
            {"right": False, "error": "RuntimeError: the section failed"},
        ],
    }


def test_targets_are_met_or_missed() -> None:
    found = [(row["at_least"], row["found"], row["met"]) for row in targets.check(_result())]
    assert found == [(0.7, 0.8, True), (0.7, 0.2, False), (0.95, 0.96, True), (0.98, 0.97, False), (0.87, 0.87, True)]


def test_the_roofline_is_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    result, drawn = tmp_path / "result.json", tmp_path / "roofline.svg"
    result.write_text(json.dumps(_result()))
    monkeypatch.setattr(sys, "argv", ["plot", str(result), str(drawn)])
    assert plot.main() == 0
    text = drawn.read_text()
    for words in ("qwen3-vl-4b", "a GPU", "decode", "prefill", "operations per byte"):
        assert words in text
    (axes,) = plot.draw(_result()).axes
    roof, decode, _ = (line.get_xydata().tolist() for line in axes.lines)
    assert roof[1] == pytest.approx([200, 800])  # where copying and products meet
    assert decode == [pytest.approx([4.0, 12.8])]

    result.write_text(json.dumps({"attention": []}))
    with pytest.raises(SystemExit):
        plot.main()
    assert "has no times" in capsys.readouterr().err


def _compiled(*arguments: str) -> list[str]:
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.kernels.compiled", *arguments]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr + ran.stdout
    return ran.stdout.splitlines()


def test_the_kernels_compile_for_a_gpu() -> None:
    """To machine code for an H100, with real bfloat16 products; the assembler comes with Triton."""
    lines = _compiled("--geometry", "tiny", "--rows", "1", "--forms", "merged")
    assert [re.split(": ", line)[1] for line in lines] == [
        *("memory_tiles", "merge_items"),  # in a graph
        *("memory_tiles", "memory_tiles", "merge_items"),  # a short memory by itself, and a long one
    ]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("capability", ["80", "89", "90"])
def test_every_variant_compiles_for_a_gpu(capability: str, dtype: str) -> None:
    arguments = ["--geometry", *GEOMETRIES, "--capability", capability, "--dtype", dtype]
    assert _compiled(*arguments)
