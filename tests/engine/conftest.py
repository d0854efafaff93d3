"""What one file's engines leave behind in the process is not there for the next file's, whatever their order."""

import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", autouse=True)
def nothing_of_earlier_engines() -> Iterator[None]:
    """vLLM keeps its groups of ranks, and those of a dense model have none for experts.

    It imports numba for n-grams. Where Triton is, its start of an engine looks through all modules, and fails at an
    object of llvmlite that has every attribute.
    """
    if (state := sys.modules.get("vllm.distributed.parallel_state")) is not None:
        state.destroy_model_parallel()
    yield
    for name in [name for name in sys.modules if name.startswith("llvmlite")]:
        del sys.modules[name]
