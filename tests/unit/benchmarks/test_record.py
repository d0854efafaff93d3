"""A benchmark's result says which command printed it, and on what machine."""

import json
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks.record import keep, parser_of


def test_a_result_has_its_command_and_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "result.json"
    monkeypatch.setitem(sys.modules, "__main__", SimpleNamespace(__spec__=ModuleSpec("benchmarks.churn.run", None)))
    monkeypatch.setattr(sys, "argv", ["run.py", "--name", "two words", "--output", str(path)])
    parser = parser_of("What it is.")
    parser.add_argument("--name")
    options = parser.parse_args()
    keep({"benchmark": "churn", "passed": True}, options.output)
    result = json.loads(path.read_bytes())
    assert result == json.loads(capsys.readouterr().out)
    assert result["command"] == f"python -m benchmarks.churn.run --name 'two words' --output {path}"
    assert result["machine"]["versions"]["inducekv"]
    assert (result["benchmark"], result["passed"]) == ("churn", True)
