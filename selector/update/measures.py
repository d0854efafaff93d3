"""Measures of a memory that both recipes report.

Shapes: B entries, d hidden size.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from inducekv_vllm.bundle import ENTRY_AXES, Bundle, EntryRecord

from .coverage import Coverage

COSINE_BINS: Final = 20


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


def diversity(keys: Tensor) -> dict[str, Any]:
    """How a set of unit keys [B, d] spreads: log det of its coverage matrix, and the cosines of all pairs."""
    B = len(keys)
    weights = torch.ones(B, dtype=torch.float64)
    measures: dict[str, Any] = {"logdet": -float(Coverage.of_keys(keys, B).value(weights))}
    if B > 1:
        cosines = pairwise_cosines(keys)
        counts, edges = np.histogram(cosines, bins=COSINE_BINS, range=(-1, 1))
        measures |= {
            "cosine_mean": float(cosines.mean()),
            "cosine_quantiles": {str(q): float(np.quantile(cosines, q)) for q in (0.05, 0.5, 0.95)},
            "cosine_histogram": {"counts": counts.tolist(), "edges": edges.round(6).tolist()},
        }
    return measures


def pairwise_cosines(keys: Tensor) -> NDArray[np.float64]:
    """Cosines of all pairs i < j of unit vectors [B, d] (paper, Eq. selected_pairwise_cosine): [B (B - 1) / 2]."""
    upper = np.triu_indices(len(keys), k=1)
    cosines: NDArray[np.float64] = (keys.double() @ keys.double().T).clamp(-1, 1).numpy()[upper]
    return cosines
