"""The suite of the real-data text stream: on made-up data."""

from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from benchmarks.real import sources
from benchmarks.real.tasks import TASKS
from benchmarks.research.continual.suites import load_suite
from benchmarks.research.continual.suites.made import load_real_text
from benchmarks.research.continual.suites.suite import Suite
from inducekv_vllm.errors import ConfigError
from tests.unit.benchmarks.made_up_packages import MadeUp

SIZES = {"train": 96, "validation": 24, "test": 24}


def small(folder: Path) -> Suite:
    return load_real_text(folder, SIZES, SIZES, MadeUp())


def test_the_suite_is_written_once_and_read_from_then_on(tmp_path: Path) -> None:
    suite = small(tmp_path)
    assert [task.name for task in suite.tasks] == list(TASKS)
    files = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.jsonl")}
    again = load_real_text(tmp_path, SIZES, SIZES, MadeUp(count=100))  # too few for anything to be made of them
    assert again.digest() == suite.digest()
    assert files == {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.jsonl")}
    shown = [example for example in suite.base.test if len(example.messages) > 1]
    assert shown
    assert all([m["role"] for m in example.messages] == ["user", "assistant"] * 4 + ["user"] for example in shown)


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def absent(name: str) -> None:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(sources, "distribution", absent)
    with pytest.raises(ConfigError, match=r"the package emoji is not installed: install it with .make setup-real"):
        load_suite("real-text", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]
