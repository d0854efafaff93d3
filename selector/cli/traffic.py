"""What a server's `--gate-log` file holds: the evidence of its requests.

Shapes: n requests, H evidence of a request.
"""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from reprlib import repr as shown
from typing import Any, Final

import torch
from pydantic_core import from_json
from torch import Tensor

from inducekv_vllm.bundle import Gate
from inducekv_vllm.errors import TaskDataError

MAX_LINE_BYTES: Final = 4 * 2**20
MOST: Final = 1.001  # evidence is at most 1, up to rounding


def read_traffic(path: Path, gate: Gate) -> Tensor:
    """The evidence [n, H] float32 of all requests of the log.

    Raises:
        TaskDataError: the log cannot be read, holds no request, or has a line that is malformed or of a gate that looks
            at something else; it names the line.
    """
    digest, size = gate.token_digest, gate.weights.shape[1]
    rows: list[list[float]] = []
    try:
        with path.open("rb") as file:
            for number in itertools.count(1):
                if not (line := file.readline(MAX_LINE_BYTES)):
                    break
                rows.append(_evidence(line, digest, size, f"{path}, line {number}"))
    except OSError as error:
        raise TaskDataError(f"{path}: cannot read the gate log: {error.strerror}") from error
    if not rows:
        raise TaskDataError(f"{path}: the gate log holds no requests")
    return torch.tensor(rows)


def _evidence(line: bytes, digest: str, size: int, place: str) -> list[float]:
    try:
        record: Any = from_json(line)
    except ValueError as error:
        raise TaskDataError(f"{place}: malformed JSON: {error}") from error
    if not isinstance(record, dict) or not isinstance(record.get("gate"), str):
        raise TaskDataError(f"{place}: expected an object with gate, evidence and task, found {shown(record)}")
    if record["gate"] != digest:
        raise TaskDataError(
            f"{place}: it is of another gate ({record['gate']:.12}), and its evidence means nothing to this one "
            f"({digest:.12})"
        )
    evidence = record.get("evidence")
    if not isinstance(evidence, list) or len(evidence) != size or not all(map(_is_evidence, evidence)):
        raise TaskDataError(f"{place}: 'evidence' must be {size} numbers from 0 to 1, found {shown(evidence)}")
    return [float(number) for number in evidence]


def _is_evidence(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and math.isfinite(value) and 0 <= value <= MOST
