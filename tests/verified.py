"""A plugin for pytest: `make test` leaves the tests of research out if they have passed on its files as they are.

    python -m tests.verified

writes down that they have: `make test-research` does so at its end. What counts are the files of `benchmarks/research`
and `tests/research`, and the modules of `benchmarks` that these import, directly or through others. The product's
modules do not count: a change of those is for `make test-nightly`, which runs the tests of research always. They run
too where the command line names them or selects by a marker.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.imports import ROOT, imports_of, name_of

if TYPE_CHECKING:
    from xdist.workermanage import WorkerController

RESEARCH = ROOT / "tests" / "research"
FOLDERS = ("benchmarks/research", "tests/research")
VERIFIED = "tests/research/verified.json"
LEFT_OUT = pytest.StashKey[bool]()
SENT = "research_left_out"


def pytest_configure(config: pytest.Config) -> None:
    """Workers of pytest-xdist are told, so that all collect the same while files change."""
    sent: bool | None = getattr(config, "workerinput", {}).get(SENT)
    config.stash[LEFT_OUT] = leaves_out(config) if sent is None else sent


def leaves_out(config: pytest.Config) -> bool:
    places = [(config.invocation_params.dir / name.partition("::")[0]).resolve() for name in config.args]
    if config.option.markexpr or any(place.is_relative_to(RESEARCH) for place in places):
        return False
    return any(RESEARCH.is_relative_to(place) for place in places) and is_verified()


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: WorkerController) -> None:
    node.workerinput[SENT] = node.config.stash[LEFT_OUT]


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    return True if config.stash[LEFT_OUT] and collection_path == RESEARCH else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(RESEARCH):
            item.add_marker("research")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if config.stash[LEFT_OUT]:
        terminalreporter.write_line(f"tests/research left out: passed on these files ({VERIFIED}); make test-research")


def files(root: Path = ROOT) -> list[Path]:
    """Those that count, sorted."""
    found = {path for folder in FOLDERS for path in (root / folder).rglob("*") if path.is_file()}
    found = {path for path in found if "__pycache__" not in path.parts} - {root / VERIFIED}
    modules = {name_of(path, root): path for path in (root / "benchmarks").rglob("*.py")}
    unread = [path for path in found if path.suffix == ".py"]
    while unread:
        names = [imported.name for imported in imports_of(unread.pop(), root)]
        added = {modules[part] for name in names for part in prefixes(name) if part in modules} - found
        found |= added
        unread += added
    return sorted(found)


def prefixes(name: str) -> list[str]:
    """A dotted name and the packages above it, whose `__init__` an import runs too."""
    parts = name.split(".")
    return [".".join(parts[:length]) for length in range(1, len(parts) + 1)]


def digest(root: Path = ROOT) -> str:
    """SHA-256 of the files that count: their paths and their bytes."""
    lines = [f"{hashlib.sha256(path.read_bytes()).hexdigest()} {path.relative_to(root)}\n" for path in files(root)]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def is_verified(root: Path = ROOT) -> bool:
    """Whether the digest is the one written down."""
    path = root / VERIFIED
    return path.exists() and json.loads(path.read_bytes()) == {"sha256": digest(root)}


def verify(root: Path = ROOT) -> None:
    (root / VERIFIED).write_text(json.dumps({"sha256": digest(root)}) + "\n")


if __name__ == "__main__":
    verify()
