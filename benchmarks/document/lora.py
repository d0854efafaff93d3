"""A document in a LoRA adapter: the turns that ask about it, as they do while it is compacted, are what is learned."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from benchmarks.lora_adapter import attached_fit
from inducekv_vllm.backbone.footprint import FLOAT16_BYTES
from selector.backbone.model import Backbone
from selector.data.examples import Example

RANK, RATE, STEPS = 1, 1e-3, 100


@contextmanager
def adapted(backbone: Backbone, examples: Sequence[Example]) -> Iterator[int]:
    """The backbone answers with an adapter of all linear layers; yields its bytes in float16."""
    model, fit = attached_fit(backbone, RANK, examples)
    try:
        fit.run(RATE, STEPS)
        yield FLOAT16_BYTES * sum(each.numel() for each in fit.parameters)
    finally:
        model.unload()
