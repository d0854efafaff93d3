"""A suite of one's own: `python -m benchmarks.research.continual run --suite own_suite:load --data DIR ...`.

DIR has a folder for each task, in the order of their names, with train.jsonl and test.jsonl as `inducekv-select` reads
them. There are no base questions and no validation split: a tenth of the training examples becomes one.
"""

from collections.abc import Sequence
from difflib import SequenceMatcher
from pathlib import Path

from benchmarks.research.continual.metrics import average, mean_average_accuracy_over_time
from benchmarks.research.continual.suites.suite import Suite, TaskData, TaskScore
from selector.data.examples import Example, read_task


def score(task: str, questions: Sequence[Example], answers: Sequence[str]) -> TaskScore:
    """How much of each answer's text is that of the right one: 0 to 1, and their mean."""
    each = tuple(
        SequenceMatcher(None, answer.lower(), question.answer.lower()).ratio()
        for question, answer in zip(questions, answers, strict=True)
    )
    return TaskScore(sum(each) / len(each), each)


def load(data: Path) -> Suite:
    tasks = tuple(
        TaskData(
            folder.name,
            train=tuple(read_task(folder / "train.jsonl")),
            test=tuple(read_task(folder / "test.jsonl")),
        )
        for folder in sorted(data.iterdir())
        if folder.is_dir()
    )
    metrics = {"own: final": average, "own: over time": mean_average_accuracy_over_time}
    return Suite("own", tasks, score=score, new_tokens=16, metrics=metrics)
