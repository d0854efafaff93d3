"""What the CPU says of itself."""

import contextlib
import ctypes
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from selector.refined.settings import RefinedSettings
from selector.runtime import cpu


@pytest.mark.parametrize(
    ("flags", "precision"),
    [
        ("flags\t\t: fpu avx2 avx512f avx512_bf16 bmi1\n", "bfloat16"),
        ("flags\t\t: fpu amx_bf16\n", "bfloat16"),
        ("flags\t\t: fpu avx2 avx512f avx512bw\n", "float32"),  # torch would emulate it
        ("", "float32"),
    ],
)
def test_the_usual_precision_follows_the_cpus_instructions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: str, precision: str
) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text(f"processor\t: 0\n{flags}\n")
    monkeypatch.setattr(cpu, "CPU_INFO", info)
    assert RefinedSettings().precision == precision
    assert RefinedSettings(precision="bfloat16").precision == "bfloat16"


@pytest.mark.parametrize(("has_instructions", "expected"), [(True, "medium"), (False, "highest")])
def test_products_are_rounded_inside_alone(
    monkeypatch: pytest.MonkeyPatch, has_instructions: bool, expected: str
) -> None:
    monkeypatch.setattr(cpu, "has_bfloat16", lambda: has_instructions)
    with contextlib.suppress(ValueError), cpu.rounded_products():
        assert torch.get_float32_matmul_precision() == expected
        raise ValueError
    assert torch.get_float32_matmul_precision() == "highest"


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="needs glibc 2.33")
def test_the_memory_of_large_tensors_is_kept() -> None:
    """A large tensor is no mapping of its own, which the kernel would take back with it."""
    count = (
        "import ctypes, sys, torch; from selector.runtime.cpu import keep_freed_memory\n"
        "if sys.argv[1:]: keep_freed_memory()\n"
        "info = ctypes.CDLL(None).mallinfo2\n"
        "class Info(ctypes.Structure): _fields_ = [('numbers', ctypes.c_size_t * 10)]\n"
        "info.restype = Info\n"
        "before = info().numbers[3]\n"  # blocks that are mapped
        "large = torch.ones(2**26, dtype=torch.uint8)\n"
        "print(info().numbers[3] - before)"
    )
    mapped = [
        int(subprocess.run([sys.executable, "-c", count, *more], capture_output=True, check=True).stdout)
        for more in ([], ["kept"])
    ]
    assert mapped == [1, 0]
