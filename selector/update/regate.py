"""The next version of a bundle with another gate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from inducekv_vllm.bundle import Bundle, Gate, with_entries


def with_gate(bundle: Bundle, gate: Gate, settings: Mapping[str, Any]) -> Bundle:
    """The bundle with this gate; entries, payloads and calibration are as before, to the bit. It is not signed.

    Args:
        gate: for the same tasks, in the types in which a bundle stores it.
        settings: what is recorded of the fit, in the place of what was recorded of the one before.

    Raises:
        BundleError: the gate does not fit the bundle.
    """
    metadata = bundle.metadata.model_copy(
        update={
            "gate": gate.record,
            "gate_tasks": gate.tasks,
            "settings": bundle.metadata.settings | dict(settings),
            "parent_digest": bundle.digest,
        }
    )
    tensors: dict[str, Any] = gate.tensors()
    return with_entries(replace(bundle, metadata=metadata, **tensors), metadata.entries)
