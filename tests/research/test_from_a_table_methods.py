"""`benchmarks.from_a_table` learns as the methods of the streams do, with the same settings."""

from pathlib import Path

from benchmarks.from_a_table import __main__ as command
from benchmarks.from_a_table import learned
from benchmarks.research.continual.methods import RunContext
from benchmarks.research.continual.methods.lora import Lora
from benchmarks.research.continual.methods.neighbours import PromptReplay
from benchmarks.research.continual.suites import TaskData
from selector.data.examples import read_task
from selector.data.records import Columns
from selector.refined.settings import usual_precision


class BestLora(Lora):
    def rates(self) -> tuple[float, ...]:
        return learned.RATES


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_lora_and_retrieval_are_those_of_the_streams(model: Path, tmp_path: Path) -> None:
    rows = learned.Rows(model, read_task(command.TABLES / "train.csv", Columns("ticket", "team", task="support")), ())
    training, validation = rows.split()
    task = TaskData("support", tuple(training), tuple(validation))
    lora = BestLora(steps=3, batch_size=4, precision=usual_precision(), rank=2)
    for name, learn, method in (
        ("lora", learned.by_lora(2, steps=3), lora),
        ("retrieval", learned.by_retrieval, PromptReplay(key="early")),
    ):
        ours, theirs = tmp_path / name / "ours", tmp_path / name / "theirs"
        ours.mkdir(parents=True)
        theirs.mkdir()
        made = learn(rows, ours)
        expected = method.learn(task, None, theirs, RunContext(model, 1 << 20, 0, 0, 1))
        assert (made.kind, made.path, made.stored_bytes) == (expected.kind, expected.path, expected.stored_bytes)
        assert files(ours) == files(theirs)
