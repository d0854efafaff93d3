"""Folders of finished runs, written by hand, and the command of the diagnostics that read them."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.machine import describe_machine
from benchmarks.research.continual.diagnostics.__main__ import main
from benchmarks.research.continual.methods import Artifact
from benchmarks.research.continual.metrics import accuracy_matrix, summary
from benchmarks.research.continual.results import weights_digest
from benchmarks.research.continual.suites import Suite
from inducekv_vllm.bundle import Bundle, write_bundle
from server.demo import CHECKPOINT

PNG = b"\x89PNG"
WEIGHTS = weights_digest(CHECKPOINT)
Rights = Mapping[str, Sequence[bool]]  # by task and "base": whether each question was answered rightly


def write_configuration(out: Path, folder: Path | None = None, suite: Suite | None = None, **changed: Any) -> None:
    """run.json of the demo model, with other values if given; without data in a folder, of some that are not read."""
    out.mkdir(parents=True, exist_ok=True)
    configuration = {
        "suite": "demo",
        "data": suite.digest() if suite else "",
        "order": [task.name for task in suite.tasks] if suite else [],
        "model": {"name": CHECKPOINT.name, "weights": WEIGHTS},
        "split": "test",
        "train_limit": 512,
        "test_limit": 256,
        "base_limit": 270,
    }
    if folder is not None:
        configuration["where"] = {"suite": "demo", "data": str(folder), "model": str(CHECKPOINT)}
    (out / "run.json").write_text(json.dumps(configuration | changed))


def matrix_of(
    method: str, order: Sequence[str], accuracy: Sequence[Sequence[float]], base: Sequence[float], **changed: Any
) -> dict[str, Any]:
    """The content of matrix.json, with other values if given; unfinished if there are fewer rows than tasks."""
    done = len(accuracy)
    matrix = {
        "suite": "demo",
        "method": method,
        "settings": {},
        "budget": 32,
        "seed": 0,
        "order": list(order),
        "complete": done == len(order),
        "accuracy": accuracy,
        "base": base,
        "stored_bytes": [0 if method == "no_memory" else 1000] * done,
        "anchor_bytes": [0] * done,
        "questions": [],
        "seconds": [{"learn": 2.0, "evaluate": 3.0}] * done,
        "metrics": summary(accuracy_matrix(accuracy), base),
        "reports": [{}] * done,
    }
    return matrix | changed


def write_finished_run(
    out: Path,
    method: str,
    rights: Sequence[Rights],
    *,
    suite: Suite | None = None,
    bundles: Sequence[Bundle] = (),
    **changed: Any,
) -> Path:
    """One run whose matrix, but for what is changed, follows from `rights` after each task.

    Args:
        rights: of the tasks so far, and of the base.
        suite: whose questions were asked (default: numbered ones).
        bundles: the memory after each task.
    """
    order = [task for task in rights[-1] if task != "base"]
    shares = [{task: sum(answers) / len(answers) for task, answers in after.items()} for after in rights]
    accuracy = [[share[task] for task in order[: number + 1]] for number, share in enumerate(shares)]
    matrix = matrix_of(method, order, accuracy, [share["base"] for share in shares], **changed)
    folder = out / method / f"budget-{matrix['budget']}" / f"seed-{matrix['seed']}"
    tasks = (*suite.tasks, suite.base) if suite else ()
    questions = {task.name: [(example.id, example.answer) for example in task.test] for task in tasks}
    for number, (name, after) in enumerate(zip(order, rights, strict=True)):
        state = folder / f"{number:02d}-{name}" / "state"
        state.mkdir(parents=True, exist_ok=True)
        if bundles:
            write_bundle(bundles[number], state / "memory.safetensors")
            Artifact("bundle", "memory.safetensors", 0, {}).write(state)
        else:
            Artifact("none", None, 0, {}).write(state)
        predictions = []
        for task, answers in after.items():
            asked = questions.get(task) or [(str(row), "yes") for row in range(len(answers))]
            for (id_, expected), right in zip(asked, answers, strict=True):
                answer = expected if right else f"{method} says"
                predictions.append(
                    {"task": task, "id": id_, "expected": expected, "answer": answer, "score": float(right)}
                )
        (state.parent / "predictions.jsonl").write_text("".join(json.dumps(line) + "\n" for line in predictions))
    (folder / "matrix.json").write_text(json.dumps(matrix))
    return folder


def write_run(out: Path, method: str, order: Sequence[str], **more: Any) -> Path:
    """A finished run over `order` with one question a task, answered rightly; `more` as for `write_finished_run`."""
    rights = [{task: [True] for task in (*order[: number + 1], "base")} for number in range(len(order))]
    return write_finished_run(out, method, rights, **more)


def diagnose(diagnostic: str, out: Path, *arguments: object) -> dict[str, Any]:
    """Runs the command; returns the JSON it wrote beside a picture."""
    assert main([diagnostic, "--out", str(out), *map(str, arguments)]) == 0
    assert (out / "diagnostics" / f"{diagnostic}.png").read_bytes().startswith(PNG)
    measured = json.loads((out / "diagnostics" / f"{diagnostic}.json").read_bytes())
    assert measured["machine"] == describe_machine()
    return measured
