"""How two measured values go together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy.stats import pearsonr, spearmanr

FEWEST = 3  # pairs, of which a correlation is computed


def correlation(one: Sequence[float], other: Sequence[float]) -> dict[str, Any]:
    """Pearson's r and Spearman's rho of the pairs that are known; None for fewer than three, or if one is constant."""
    pairs = np.array([pair for pair in zip(one, other, strict=True) if all(map(math.isfinite, pair))])
    found: dict[str, Any] = {"pairs": len(pairs), "pearson": None, "spearman": None}
    if len(pairs) >= FEWEST and np.ptp(pairs, axis=0).all():
        found["pearson"], found["spearman"] = (float(f(*pairs.T).statistic) for f in (pearsonr, spearmanr))
    return found
