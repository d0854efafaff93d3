"""`inducekv-select` with people's tables, presets and dry runs."""

import csv
from pathlib import Path

import pytest

from inducekv_vllm.errors import ConfigError
from selector.cli.columns import ColumnOptions
from selector.cli.select import main
from selector.data.columns import Columns
from selector.data.examples import read_task
from tests.unit.selector.stream import SMALL, Stream

FEW = ("--steps", "2", "--batch-size", "4", *SMALL)


@pytest.fixture
def table(tmp_path: Path, tasks: dict[str, Path]) -> Path:
    """The questions and answers of a task without its pictures, in columns of other names."""
    path = tmp_path / "support.csv"
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("ticket", "reply", "label"))
        for number, example in enumerate(read_task(tasks["colours"])):
            text = " ".join(part["text"] for part in example.messages[-1]["content"] if part["type"] == "text")
            writer.writerow((f"{number}: {text}", example.answer, "x"))
    return path


def run(model: Path, table: Path, output: Path, *more: str) -> int:
    columns = ("--columns", "prompt=ticket,answer=reply", "--task-name", "support")
    return main(["--model", str(model), "--task", str(table), "--output", str(output), *columns, *more])


def test_a_table_is_learned(
    model_folders: dict[str, Path], table: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out" / "support.safetensors"
    assert run(model_folders["llava"], table, output, "--facts", "off", "--learning-rate", "0.1", *FEW) == 0
    bundle = Stream(tmp_path / "out", model_folders["llava"], {}).bundle("support")
    assert {entry.task for entry in bundle.metadata.entries} == {"support"}
    printed, noted = capsys.readouterr()
    assert f"inducekv-select: warning: {table}: a column is not used: 'label' (12 rows)" in noted.splitlines()
    assert "memory: 0." in printed
    assert f"serve it: inducekv-serve {model_folders['llava']} --memory support={output}" in printed


@pytest.mark.parametrize("recipe", ["refined", "paper"])
def test_a_dry_run_says_what_it_would_do(
    recipe: str, model_folders: dict[str, Path], table: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out" / "support.safetensors"
    table.write_text(table.read_text() + "\n".join(["a,red,y", "a,red,z", "a,blue,z"]))
    more = FEW if recipe == "refined" else ("--recipe", "paper", "--beta", "1", "--gamma", "0", *SMALL)
    assert run(model_folders["llava"], table, output, "--dry-run", *more) == 0
    printed, noted = capsys.readouterr()
    assert [
        line.removeprefix(f"inducekv-select: warning: {table}") for line in noted.splitlines() if str(table) in line
    ] == [
        ": a column is not used: 'label' (15 rows)",
        f"inducekv-select: warning: 1 row repeats an earlier one, and equal rows are learned once: the first is "
        f"{table}, line 15, like {table}, line 14",
        "inducekv-select: warning: 1 question has several answers, which contradict each other and are all learned: "
        f"the first is {table}, line 14 ('red') and {table}, line 16 ('blue')",
    ]
    assert "task: support; 13 training and 1 validation examples" in printed
    assert "tokens with the answer:" in printed
    assert f"{output}: not written, this was a dry run" in printed
    if recipe == "refined":
        assert "training: 6 begun, one of 2 steps finished, at most" in printed
    else:
        assert "time: not estimated for the paper's recipe" in printed
    assert not (tmp_path / "out").exists()


def test_presets_are_settings_that_flags_change(
    model_folders: dict[str, Path], table: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out" / "support.safetensors"
    assert run(model_folders["llava"], table, output, "--preset", "quick", "--facts", "off", *FEW) == 0
    settings = Stream(tmp_path / "out", model_folders["llava"], {}).bundle("support").metadata.settings
    assert (settings["activation"], settings["learning_rate"], settings["steps"]) == ("generation", 0.1, 2)
    assert run(model_folders["llava"], table, output, "--preset", "best", "--recipe", "paper") == 2
    assert "--preset is for the recipe 'refined', and this run's is 'paper'" in capsys.readouterr().err


def test_the_columns_stand_in_one_flag() -> None:
    """Their names may have commas and signs of equality."""
    assert ColumnOptions().of_table() == Columns()
    named = ColumnOptions(columns="prompt=Question, in short,answer=a=b", task_name="t")
    assert named.of_table() == Columns(prompt="Question, in short", answer="a=b", task="t")
    for wrong in ("", "ticket", "prompt=", "prompt=a,prompt=b", "answers=a"):
        with pytest.raises(ConfigError, match=r"--columns must be like prompt=NAME,answer=NAME,image=NAME, found"):
            ColumnOptions(columns=wrong).of_table()
