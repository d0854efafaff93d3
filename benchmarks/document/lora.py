"""A document in a LoRA adapter: the turns that ask about it, as they do while it is compacted, are what is learned."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from benchmarks.fit import Fit
from benchmarks.lora_adapter import attach
from inducekv_vllm.backbone.footprint import FLOAT16_BYTES
from selector.backbone.model import Backbone
from selector.backbone.scoring import Scorer
from selector.data.examples import Example
from selector.refined.settings import usual_precision

RANK, RATE, STEPS, BATCH = 1, 1e-3, 100, 4


@contextmanager
def adapted(backbone: Backbone, examples: Sequence[Example]) -> Iterator[int]:
    """The backbone answers with an adapter of all linear layers; yields its bytes in float16."""
    model = attach(backbone, RANK, seed=0)
    try:
        parameters = [each for each in model.parameters() if each.requires_grad]
        Fit(
            *(Scorer(backbone), parameters, examples, []),
            batch_size=BATCH,
            seed=(0, 0),
            autocast=usual_precision() == "bfloat16",
        ).run(RATE, STEPS)
        yield FLOAT16_BYTES * sum(each.numel() for each in parameters)
    finally:
        model.unload()
