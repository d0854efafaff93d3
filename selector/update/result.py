"""What an update makes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from inducekv_vllm.bundle import Bundle


@dataclass(frozen=True)
class UpdateResult:
    """The next memory, and the content of its `report.json`."""

    bundle: Bundle
    report: dict[str, Any]
    training_keys: Tensor  # [number of training examples, d] float32


def helps(report: Mapping[str, Any]) -> bool:
    """Whether a memory has a smaller loss on the validation examples than none; also without such examples."""
    losses = report["validation_nll"]
    return losses is None or bool(losses["deployed"] < losses["no_memory"])
