"""The tests of research are left out exactly as long as it, and what it imports of `benchmarks`, stays the same."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.imports import ROOT
from tests.verified import (
    is_verified,
    verify,
)

FILES = {
    "benchmarks/__init__.py": "",
    "benchmarks/churn.py": "",
    "benchmarks/fit.py": "import selector.recipes\n",
    "benchmarks/real/__init__.py": "",
    "benchmarks/real/tasks.py": "from benchmarks import fit\n",
    "benchmarks/real/words.py": "",
    "benchmarks/research/__init__.py": "",
    "benchmarks/research/facts.py": "def run():\n    from ..real.tasks import TASKS\n",
    "benchmarks/research/preset.toml": "",
    "docs/results.md": "",
    "pytest.ini": "[pytest]\naddopts = --strict-markers\ntestpaths = tests\nmarkers =\n  research\n  slow\n",
    "selector/__init__.py": "",
    "selector/recipes.py": "",
    "tests/__init__.py": "",
    "tests/conftest.py": 'pytest_plugins = ["tests.verified"]\n',
    "tests/research/__init__.py": "",
    "tests/research/test_facts.py": "def test_facts():\n    pass\n",
    "tests/unit/test_words.py": "def test_words():\n    pass\n",
}
COUNT = [
    "benchmarks/__init__.py",
    "benchmarks/fit.py",
    "benchmarks/real/__init__.py",
    "benchmarks/real/tasks.py",
    "benchmarks/research/facts.py",
    "benchmarks/research/preset.toml",
    "tests/research/test_facts.py",
]
DO_NOT_COUNT = [
    "benchmarks/churn.py",
    "benchmarks/real/words.py",
    "docs/results.md",
    "selector/recipes.py",
    "tests/unit/test_words.py",
]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A repository whose tests of research have passed."""
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    for name in ("imports", "verified"):
        shutil.copy(ROOT / "tests" / f"{name}.py", tmp_path / "tests")
    verify(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", COUNT)
def test_a_changed_byte_counts(root: Path, name: str) -> None:
    assert is_verified(root)
    with (root / name).open("a") as file:
        file.write("#")
    assert not is_verified(root)
    verify(root)
    assert is_verified(root)


@pytest.mark.parametrize("name", DO_NOT_COUNT)
def test_an_unrelated_file_does_not(root: Path, name: str) -> None:
    with (root / name).open("a") as file:
        file.write("#")
    assert is_verified(root)


def test_a_file_that_comes_moves_or_goes_counts(root: Path) -> None:
    file, moved = root / "benchmarks" / "research" / "preset.toml", root / "benchmarks" / "research" / "other.toml"
    file.rename(moved)
    assert not is_verified(root)
    moved.unlink()
    assert not is_verified(root)
    file.touch()
    assert is_verified(root)


def passed(root: Path, *arguments: str) -> tuple[int, bool]:
    """How many tests pass, and whether the summary says that research is left out."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (count,) = re.findall(r"^(\d+) passed", done.stdout, re.M)
    lines = [line for line in done.stdout.splitlines() if line.startswith("tests/research left out")]
    assert len(lines) <= 1
    return int(count), bool(lines)


def test_a_run_of_all_tests_leaves_research_out(root: Path) -> None:
    assert passed(root) == passed(root, "tests") == (1, True)
    assert passed(root, "tests/unit") == (1, False)
    (root / "benchmarks/fit.py").write_text("RATE = 1\n")
    assert passed(root) == (2, False)


def test_research_runs_where_it_is_asked_for(root: Path) -> None:
    assert passed(root, "tests/research") == passed(root, "tests/research/test_facts.py::test_facts") == (1, False)
    assert passed(root, "-m", "research") == (1, False)
    assert passed(root, "-m", "not slow") == (2, False)
