"""Shared by all tests: which of them run on this machine."""

from __future__ import annotations

import pytest
import torch


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skips `gpu` tests where there is no CUDA device, and `slow` ones unless the user selects by marker."""
    skip_gpu = pytest.mark.skip(reason="needs a CUDA device")
    skip_slow = pytest.mark.skip(reason="slow; select it with -m slow")
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(skip_gpu)
        if item.get_closest_marker("slow") and "slow" not in config.option.markexpr:
            item.add_marker(skip_slow)
