"""How long retrieval takes on its own: exact search, softmax and page terms for one query key, in this process."""

from __future__ import annotations

import time
from statistics import median

import numpy as np

from benchmarks.random_bundles import TEMPERATURE
from inducekv_vllm.retrieval.index import PrefixIndex
from inducekv_vllm.retrieval.page_terms import page_terms

ENTRIES = 512
WIDTHS = (256, 768, 4096)  # hidden sizes: the demo model's, the 80M model's, an 8B model's


def retrieval_ms(width: int, top_k: int | None, repeats: int = 300) -> float:
    """Median milliseconds over `ENTRIES` random keys of `width` numbers."""
    rng = np.random.default_rng(0)
    keys = rng.standard_normal((ENTRIES, width), dtype=np.float32)
    keys /= np.linalg.norm(keys, axis=1, keepdims=True)
    index = PrefixIndex(keys)
    times = []
    for query in keys[rng.integers(ENTRIES, size=repeats)]:
        start = time.perf_counter()
        retrieved = index.search(query, TEMPERATURE, top_k)
        page_terms(retrieved, "sqrt", payload_tokens=8, num_entries=ENTRIES, remainder=True)
        times.append(time.perf_counter() - start)
    return 1000 * median(times)


def measure() -> dict[str, float]:
    """Median milliseconds by width, for all entries and for the nearest eight."""
    names = {"all": None, "top8": 8}
    return {f"d{width}_{name}": retrieval_ms(width, top_k) for width in WIDTHS for name, top_k in names.items()}
