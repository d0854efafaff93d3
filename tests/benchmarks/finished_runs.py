"""Folders of finished runs, written by hand, and the command of the diagnostics that read them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.continual.diagnostics.__main__ import main
from benchmarks.continual.methods import Artifact
from benchmarks.continual.results import weights_digest
from benchmarks.continual.suites import Suite
from inducekv_vllm.bundle import Bundle, write_bundle
from server.demo import CHECKPOINT

PNG = b"\x89PNG"
WEIGHTS = weights_digest(CHECKPOINT)
Rights = Mapping[str, Sequence[bool]]  # by task and "base": whether each question was answered rightly


def write_configuration(out: Path, suite: Suite | None = None, **changed: Any) -> None:
    """run.json of the demo model, with other values if given; without a suite, of one that is not read."""
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
    (out / "run.json").write_text(json.dumps(configuration | changed))


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
    metrics: Mapping[str, float] | None = None,
    stored_bytes: int = 0,
) -> Path:
    """One run whose matrix follows from `rights` after each task: of the tasks so far, and of the base.

    Args:
        ids: of a task's questions, in order (default: their numbers).
        bundles: the memory after each task.
        reports: of the method, for each task.
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
        "stored_bytes": [stored_bytes] * len(order),
        "seconds": [{"learn": 0.0, "evaluate": 0.0}] * len(order),
        "metrics": dict(metrics or {}),
        "reports": list(reports) or [{}] * len(order),
    }
    (folder / "matrix.json").write_text(json.dumps(matrix))
    return folder


def write_run(out: Path, method: str, order: Sequence[str], metrics: Mapping[str, float], **more: Any) -> Path:
    """A finished run over `order` with these metrics; `more` as for `write_finished_run`."""
    rights = [{task: [True] for task in (*order[: number + 1], "base")} for number in range(len(order))]
    return write_finished_run(out, method, rights, metrics=metrics, **more)


def diagnose(diagnostic: str, out: Path, *arguments: object) -> dict[str, Any]:
    """Runs the command; returns the JSON it wrote beside a picture."""
    assert main([diagnostic, "--out", str(out), *map(str, arguments)]) == 0
    assert (out / "diagnostics" / f"{diagnostic}.png").read_bytes().startswith(PNG)
    return json.loads((out / "diagnostics" / f"{diagnostic}.json").read_bytes())


def refusal(capsys: pytest.CaptureFixture[str], diagnostic: str, out: Path, *arguments: object) -> str:
    """What the command prints when it ends with status 2."""
    assert main([diagnostic, "--out", str(out), *map(str, arguments)]) == 2
    return capsys.readouterr().err
