"""A plugin for pytest (`make test-fast`): an import of vLLM fails, and the longest files are left to `make test`."""

import sys
from pathlib import Path

import pytest

from tests.groups import seconds_of
from tests.imports import ROOT

sys.modules["vllm"] = None  # type: ignore[assignment]
LONGEST = 5  # seconds that a file takes by itself (tests/durations.json), at most


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    if not collection_path.is_relative_to(ROOT):
        return None
    return True if seconds_of().get(str(collection_path.relative_to(ROOT)), 0) > LONGEST else None


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    terminalreporter.write_line(f"files of more than {LONGEST} s left out: make test runs them (tests/durations.json)")
