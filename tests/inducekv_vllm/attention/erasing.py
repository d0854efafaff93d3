"""A process that loads bundles into a pool and releases them, as a worker does: `python -m ... DTYPE`.

Each line that it reads is the path of a bundle. It loads it, or releases it if it is loaded, and answers "done".
"""

from __future__ import annotations

import sys

import torch

from inducekv_vllm.attention.page_allocator import Region
from inducekv_vllm.attention.pool import PagePool, PoolShape
from inducekv_vllm.bundle import read_bundle
from inducekv_vllm.device import device_of

SHAPE = PoolShape(entries=20, num_layers=3, num_kv_heads=2, heads_per_kv_head=3, head_size=8)


def serve(dtype: torch.dtype) -> None:
    pool, loaded = PagePool(SHAPE, dtype, device_of(torch.device("cpu"))), dict[str, Region]()
    for line in sys.stdin:
        path = line.strip()
        if path in loaded:
            loaded.pop(path).release()
        else:
            loaded[path] = region = pool.allocator.region()
            bundle = read_bundle(path, known=region.share)
            pool.store(bundle, slice(0, SHAPE.num_kv_heads), region)
            bundle.erase()
            del bundle
        print("done", flush=True)


if __name__ == "__main__":
    serve(getattr(torch, sys.argv[1]))
