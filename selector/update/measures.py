"""Measures of a memory that both recipes report."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from inducekv_vllm.bundle import ENTRY_AXES, Bundle, EntryRecord


def composition(records: Sequence[EntryRecord]) -> dict[str, int]:
    """Number of entries of each task, in the order of the memory."""
    return dict(Counter(record.task for record in records))


def memory_bytes(bundle: Bundle) -> int:
    """Bytes of the entries, the relevance gate and the facts, as far as there are any."""
    from inducekv_vllm.teaching import stored_bytes  # which imports transformers, and `inspect` does without

    return entry_bytes(bundle) + stored_gate_bytes(bundle) + stored_bytes(None, bundle.metadata.facts)


def stored_gate_bytes(bundle: Bundle) -> int:
    return sum(tensor.nbytes for tensor in bundle.gate.tensors().values()) if bundle.gate is not None else 0


def entry_bytes(bundle: Bundle) -> int:
    """Bytes of the entries' retrieval keys, payloads and maps."""
    return sum(tensor.nbytes for name, tensor in bundle.tensors().items() if name in ENTRY_AXES)


def calibration_report(bundle: Bundle) -> dict[str, Any]:
    """The bundle's calibration as JSON values."""
    return {
        "temperature": float(bundle.temperature),
        "value_gates": bundle.value_gates.tolist(),
        "layer_bias": bundle.layer_bias.tolist(),
    }
