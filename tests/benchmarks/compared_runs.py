"""Finished runs with the scores that a test wants, for the diagnostics that compare them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.continual.diagnostics.__main__ import main
from inducekv_vllm.bundle import Bundle
from tests.benchmarks.finished_runs import write_configuration, write_finished_run

PNG = b"\x89PNG"


def write_run(
    out: Path,
    method: str,
    order: Sequence[str],
    metrics: dict[str, float],
    *,
    budget: int = 32,
    seed: int = 0,
    reports: Sequence[dict[str, Any]] = (),
    bundles: Sequence[Bundle] = (),
    stored_bytes: int = 0,
) -> Path:
    """A finished run over `order` whose metrics are given."""
    rights = [{task: [True] for task in (*order[: number + 1], "base")} for number in range(len(order))]
    folder = write_finished_run(out, method, rights, budget=budget, seed=seed, reports=reports, bundles=bundles)
    matrix = json.loads((folder / "matrix.json").read_bytes())
    changed = matrix | {"metrics": metrics, "stored_bytes": [stored_bytes] * len(order)}
    (folder / "matrix.json").write_text(json.dumps(changed))
    return folder


def set_configuration(out: Path, **changed: Any) -> None:
    """run.json, with other values."""
    write_configuration(out)
    configuration = json.loads((out / "run.json").read_bytes())
    (out / "run.json").write_text(json.dumps(configuration | changed))


def found_by(diagnostic: str, out: Path, *arguments: object) -> dict[str, Any]:
    """What the command writes; the picture must be one."""
    assert main([diagnostic, "--out", str(out), *map(str, arguments)]) == 0
    assert (out / "diagnostics" / f"{diagnostic}.png").read_bytes().startswith(PNG)
    return json.loads((out / "diagnostics" / f"{diagnostic}.json").read_bytes())
