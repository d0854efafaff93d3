"""Folders of finished runs, made by hand, for the tests of diagnostics."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.continual.methods import Artifact
from benchmarks.continual.results import weights_digest
from benchmarks.continual.suites import Suite
from benchmarks.demo.model import CHECKPOINT
from inducekv_vllm.bundle import Bundle, write_bundle

Rights = Mapping[str, Sequence[bool]]  # by task and "base": which questions were answered rightly


def write_configuration(out: Path, suite: Suite | None = None, model: Path = CHECKPOINT) -> None:
    """run.json; without a suite, of one that is not to be read."""
    out.mkdir(parents=True, exist_ok=True)
    configuration = {
        "suite": "demo",
        "data": suite.digest() if suite else "",
        "order": [task.name for task in suite.tasks] if suite else [],
        "model": {"name": model.name, "weights": weights_digest(model)},
        "split": "test",
        "train_limit": 512,
        "test_limit": 256,
        "base_limit": 270,
    }
    (out / "run.json").write_text(json.dumps(configuration))


def write_finished_run(
    out: Path,
    method: str,
    rights: Sequence[Rights],
    *,
    budget: int = 32,
    seed: int = 0,
    ids: Mapping[str, Sequence[str]] | None = None,
    bundles: Sequence[Bundle] = (),
    reports: Sequence[dict[str, Any]] = (),
) -> Path:
    """One run whose matrix follows from `rights`, those after each task: of the tasks seen by then, and the base's.

    Args:
        ids: of a task's questions, in order (default: their numbers).
        bundles: the memory after each task.
        reports: what the method reported for each task.
    """
    order = [task for task in rights[-1] if task != "base"]
    folder = out / method / f"budget-{budget}" / f"seed-{seed}"
    for number, (name, after) in enumerate(zip(order, rights, strict=True)):
        state = folder / f"{number:02d}-{name}" / "state"
        state.mkdir(parents=True)
        if bundles:
            write_bundle(bundles[number], state / "memory.safetensors")
            Artifact("bundle", "memory.safetensors", 0, {}).write(state)
        else:
            Artifact("none", None, 0, {}).write(state)
        predictions = [
            {"task": task, "id": id_, "expected": "yes", "answer": "yes" if right else "no", "right": right}
            for task, answers in after.items()
            for id_, right in zip(ids[task] if ids else map(str, range(len(answers))), answers, strict=True)
        ]
        (state.parent / "predictions.jsonl").write_text("".join(json.dumps(line) + "\n" for line in predictions))
    shares = [{task: sum(answers) / len(answers) for task, answers in after.items()} for after in rights]
    matrix = {
        "suite": "demo",
        "method": method,
        "settings": {},
        "budget": budget,
        "seed": seed,
        "order": order,
        "complete": True,
        "accuracy": [[share[task] for task in order[: number + 1]] for number, share in enumerate(shares)],
        "base": [share["base"] for share in shares],
        "stored_bytes": [0] * len(order),
        "seconds": [{"learn": 0.0, "evaluate": 0.0}] * len(order),
        "metrics": {},
        "reports": list(reports) or [{}] * len(order),
    }
    (folder / "matrix.json").write_text(json.dumps(matrix))
    return folder
