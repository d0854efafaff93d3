"""Experts chosen among one group of all, where vLLM's router for CPUs has no kind without groups: for tests of parity.

Choosing the best k of one group is choosing the best k. That router takes `sigmoid` in groups alone, and leaves a bias
out everywhere else. Make an engine inside `one_group`, where the plugin's check at start finds nothing to refuse.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter

from inducekv_vllm.worker import InduceKVWorker


@contextmanager
def one_group() -> Iterator[None]:
    """Inside, vLLM's routers on CPUs are made so."""
    make = CPURouter.__init__

    def made(router: CPURouter, *args: Any, **options: Any) -> None:
        make(router, *args, **options)
        if not router.use_grouped_topk and router.e_score_correction_bias is not None:
            router.use_grouped_topk, router.num_expert_group, router.topk_group = True, 1, 1

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(CPURouter, "__init__", made)
        yield


class OneGroupWorker(InduceKVWorker):
    """In processes that a test does not share."""

    def load_model(self, *args: Any, **options: Any) -> None:
        with one_group():
            super().load_model(*args, **options)
