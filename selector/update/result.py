"""What an update makes."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, TypeVar

from inducekv_vllm.bundle import Bundle, Record, with_metadata

R = TypeVar("R", bound=Record)


@dataclass(frozen=True)
class UpdateResult:
    """The next memory, and the content of its `report.json`."""

    bundle: Bundle
    report: dict[str, Any]


def helps(report: Mapping[str, Any]) -> bool:
    """Whether a memory does better on the validation examples than none; also without such examples.

    It has a smaller loss there, or answers more of them right: a fact's answer has no loss of its own.
    """
    losses, right = report["validation_nll"], report.get("validation_accuracy")
    if losses is None or losses["deployed"] < losses["no_memory"]:
        return True
    return right is not None and bool(right["deployed"] > right["no_memory"])


def with_dates(bundle: Bundle, kept: Collection[Record], created_at: datetime, expires_at: datetime | None) -> Bundle:
    """The bundle with these dates for its entries and facts that are not `kept` as an earlier version has them.

    Args:
        created_at: in UTC, in whole seconds.
        expires_at: likewise; None for never.
    """

    def of(record: R) -> R:
        dates = {"created_at": created_at, "expires_at": expires_at}
        return record if record in kept else record.model_copy(update=dates)

    metadata = bundle.metadata
    return with_metadata(bundle, entries=tuple(map(of, metadata.entries)), facts=tuple(map(of, metadata.facts)))
