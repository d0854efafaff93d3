"""LoRA trained by the same self-study, of at most the bytes of a memory."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final

import torch

from benchmarks.lora_adapter import attach, largest_rank
from selector.backbone.scoring import batch_rows
from selector.document.teacher import Distilling

if TYPE_CHECKING:
    from benchmarks.document.__main__ import Compared

RATE: Final = 1e-3


def lora_row(compared: Compared, share: int, steps: int) -> dict[str, Any]:
    """The same loss, questions, batches and steps; AdamW, whose rate falls along a cosine."""
    backbone, settings, seed = compared.backbone, compared.settings, 0
    rank = largest_rank(backbone, compared.bytes_of(share))
    adapted = attach(backbone, rank, seed)
    parameters = [parameter for parameter in adapted.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=RATE, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(1, steps))
    lessons = {each.key: each.lesson for each in compared.training}
    scorer = Distilling(backbone, lessons)
    began = time.process_time()
    for step in range(steps):
        rows = batch_rows(len(compared.training), settings.batch_size, seed, (2, step))
        with torch.autocast("cpu", torch.bfloat16, enabled=settings.precision == "bfloat16"):
            losses = scorer.losses([compared.training[row].example for row in rows])
        optimizer.zero_grad()
        (losses.sum() / len(rows)).backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
    seconds = time.process_time() - began
    found = compared.measured(compared.scorer.predicted)
    adapted.unload()
    return found | {"mb": 2 * sum(each.numel() for each in parameters) / 1e6, "rank": rank, "seconds": seconds}
