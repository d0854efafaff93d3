"""`inducekv-bundle import text --share`: a text that keeps a part of its tokens, without a gate."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from inducekv_vllm.bundle import read_bundle
from tests.tiny_models import save_tiny_llama
from tests.unit.selector.cli.bundle_command import command, refuse

TEXT = " ".join(f"The valve number {row} of the plant opens at {row % 7 + 3} bar." for row in range(6))


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    (tmp_path / "valves.txt").write_text(TEXT)
    return ["--model", str(save_tiny_llama(tmp_path / "llama")), "--output", str(tmp_path / "valves.safetensors")]


def test_a_share_of_a_text(files: list[str], tmp_path: Path) -> None:
    """All of it is what is imported without; the half is half as large."""
    source, path = str(tmp_path / "valves.txt"), tmp_path / "valves.safetensors"
    found = {}
    for share in (None, "1", "2"):
        command("import", "text", source, *files, *(() if share is None else ("--share", share)))
        found[share] = read_bundle(path)
    whole, all_kept, half = found[None], found["1"], found["2"]
    assert all_kept.metadata.gate is None
    assert all_kept.metadata.settings == {"source": "text", "share": 1}
    tokens = whole.payload_tokens
    assert half.payload_tokens == all_kept.payload_tokens // 2
    # Blank lines stand between a document's blocks, and behind the last one.
    torch.testing.assert_close(
        all_kept.payload_values[:, :, :, :tokens], whole.payload_values, rtol=0, atol=1e-3, check_dtype=False
    )


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        (("--share", "0"), "--share is a number of tokens, 1 at least, of a text as it is, found 0"),
        (("--share", "2", "--role", "user"), "of a text as it is, found --role user"),
        (("--share", "99999"), "a share of 99999 leaves none of"),
    ],
)
def test_shares_that_cannot_be_are_refused(
    files: list[str], more: tuple[str, ...], problem: str, tmp_path: Path
) -> None:
    assert problem in refuse("import", "text", tmp_path / "valves.txt", *files, *more)
    assert not (tmp_path / "valves.safetensors").exists()
