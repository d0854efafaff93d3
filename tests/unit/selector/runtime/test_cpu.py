"""What the CPU says of itself."""

from pathlib import Path

import pytest

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
