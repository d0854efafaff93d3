"""`inducekv-bundle route` refuses what no gate can tell from each other, before a model is loaded."""

from pathlib import Path

from tests.unit.selector.cli.bundle_command import refuse


def test_base_questions_of_a_task_are_refused(tasks: dict[str, Path], tmp_path: Path) -> None:
    for base, message in (
        ("colours", "base question 'colours0' is also a question of the task 'colours'"),
        ("base", "model: no such model folder"),  # all else is right
    ):
        adapter = f"colours={tmp_path}:{tasks['colours']}"
        command = ("--model", tmp_path / "model", "--base", tasks[base], "--adapter", adapter)
        assert message in refuse("route", *command, "--output", tmp_path / "next.safetensors")
    assert not list(tmp_path.iterdir())
