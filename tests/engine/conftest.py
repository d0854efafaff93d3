"""What one file's engines leave behind in the process is not there for the next file's."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", autouse=True)
def without_llvmlite() -> Iterator[None]:
    """vLLM imports numba for n-grams. Where Triton is, its start of an engine looks through all modules, and fails at
    an object of llvmlite that has every attribute."""
    yield
    for name in [name for name in sys.modules if name.startswith("llvmlite")]:
        del sys.modules[name]
