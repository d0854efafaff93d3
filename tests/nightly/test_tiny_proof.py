"""A tiny model of a family that is not like the demo's learns a rule and facts: see `benchmarks.tiny_proof`."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.tiny_proof import FAMILIES, main


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("family", FAMILIES)
def test_memory_teaches_it_something(family: str, tmp_path: Path) -> None:
    assert main(["--family", family, "--work", str(tmp_path)]) == 0
