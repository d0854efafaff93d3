"""What a selection did, in numbers: the content of `report.json`.

Letters: N candidates, B selected, n queries, d hidden size.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from inducekv_vllm.bundle import EntryRecord

from ..paper.simplex import effective_entries, support_size
from ..runtime.process_memory import reset_peak, status_bytes
from .coverage import Coverage

COSINE_BINS = 20


@dataclass
class Phases:
    """Wall time of each part of a run, and the process's highest memory in it.

    Where the system does not let the peak be reset, it is the highest of the process's life up to the part's end, and
    the record says so.
    """

    records: list[dict[str, Any]] = field(default_factory=list)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        own = reset_peak()
        start = time.perf_counter()
        yield
        seconds, peak = round(time.perf_counter() - start, 3), status_bytes("VmHWM")
        peak_of = "phase" if own else "process"
        self.records.append({"name": name, "seconds": seconds, "peak_bytes": peak, "peak_of": peak_of})


def rounding(weights: Tensor, selected: Tensor) -> dict[str, Any]:
    """How much of the relaxed weights [N] float64 the selected rows [B] int64 hold."""
    B = len(selected)
    return {
        "selected": B,
        "support": support_size(weights),
        "effective_entries": effective_entries(weights),
        "mass_captured": float(weights[selected].sum() / weights.sum()),
        "selected_without_weight": int((weights[selected] == 0).sum()),
        "collapsed": support_size(weights) < B,
    }


def retrieval_divergence(relaxed: Tensor, deployed: Tensor, selected: Tensor) -> float:
    """Mean Jensen-Shannon divergence, in nats, of retrieval before and after rounding.

    Args:
        relaxed: [n, N], weights alpha over the pool; rows sum to 1.
        deployed: [n, B], weights over the selected entries.
        selected: [B] int64.
    """
    p = relaxed.double()
    q = torch.zeros_like(p)
    q[:, selected] = deployed.double()
    middle = (p + q) / 2

    def divergence(one: Tensor) -> Tensor:
        return torch.where(one > 0, one * (one / middle).log(), 0.0).sum(dim=1)  # [n]

    return float((divergence(p) + divergence(q)).mean() / 2)


def pairwise_cosines(keys: Tensor) -> NDArray[np.float64]:
    """Of all pairs i < j of unit vectors [B, d] (paper, Eq. selected_pairwise_cosine): [B (B - 1) / 2]."""
    above = np.triu_indices(len(keys), k=1)
    cosines: NDArray[np.float64] = (keys.double() @ keys.double().T).clamp(-1, 1).numpy()[above]
    return cosines


def diversity(keys: Tensor) -> dict[str, Any]:
    """How the keys [B, d] of a set lie to each other: cosines of all pairs, and log det of their coverage matrix."""
    B = len(keys)
    weights = torch.ones(B, dtype=torch.float64)
    found: dict[str, Any] = {"logdet": -float(Coverage.of_keys(keys, B).value(weights))}
    if B > 1:
        cosines = pairwise_cosines(keys)
        counts, edges = np.histogram(cosines, bins=COSINE_BINS, range=(-1, 1))
        found |= {
            "cosine_mean": float(cosines.mean()),
            "cosine_quantiles": {str(q): float(np.quantile(cosines, q)) for q in (0.05, 0.5, 0.95)},
            "cosine_histogram": {"counts": counts.tolist(), "edges": edges.round(6).tolist()},
        }
    return found


def composition(records: Sequence[EntryRecord]) -> dict[str, int]:
    """Entries by task, in the order of the memory."""
    return dict(Counter(record.task for record in records))
