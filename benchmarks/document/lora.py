"""LoRA trained by the same self-study."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Final

import torch

from benchmarks.lora_adapter import attach
from inducekv_vllm.backbone.footprint import FLOAT16_BYTES
from selector.backbone.model import Backbone
from selector.backbone.scoring import batch_rows
from selector.document.settings import DocumentSettings
from selector.document.study import Studied
from selector.document.teacher import Distilling

RATE: Final = 1e-3


def learned_lora(
    backbone: Backbone, studied: Sequence[Studied], settings: DocumentSettings, rank: int
) -> tuple[Any, dict[str, float]]:
    """An attached adapter, and its size and time: the same loss, questions, batches and steps as of a memory.

    AdamW, whose rate falls along a cosine.
    """
    adapted = attach(backbone, rank, settings.seed)
    parameters = [parameter for parameter in adapted.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=RATE, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(1, settings.steps))
    lessons = {each.key: each.lesson for each in studied}
    scorer = Distilling(backbone, lessons)
    began = time.process_time()
    for step in range(settings.steps):
        rows = batch_rows(len(studied), settings.batch_size, settings.seed, (2, step))
        with torch.autocast("cpu", torch.bfloat16, enabled=settings.precision == "bfloat16"):
            losses = scorer.losses([studied[row].example for row in rows])
        optimizer.zero_grad()
        (losses.sum() / len(rows)).backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
    seconds = time.process_time() - began
    numbers = sum(each.numel() for each in parameters)
    return adapted, {"mb": FLOAT16_BYTES * numbers / 1e6, "rank": rank, "seconds": seconds}
