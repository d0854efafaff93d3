"""How a model of the demo's architecture is trained, whatever its pictures: in two stages, the second resumable.

Shapes: P pictures, N rows, L tokens a row, A answer tokens.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TextIO

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from transformers import LlavaForConditionalGeneration

from benchmarks.demo import model as m
from benchmarks.demo.packing import Batch
from selector.refined.muon import Muon

MOMENTUM = 0.95  # of Muon, as torch's


def image_features(model: LlavaForConditionalGeneration, pixels: torch.Tensor) -> torch.Tensor:
    """pixels [P, 3, 48, 48] -> projected image tokens [P, 36, d]."""
    seen = model.model.vision_tower(pixels).last_hidden_state[:, 1:]
    return model.model.multi_modal_projector(seen)


def answer_logits(model: LlavaForConditionalGeneration, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits [A, vocabulary] and targets [A] at the A places of the batch that have one."""
    embedded = model.get_input_embeddings()(batch.tokens)
    with torch.no_grad():
        features = image_features(model, batch.pixels).to(embedded.dtype)
    embedded = embedded.masked_scatter((batch.tokens == m.IMAGE)[..., None], features)
    bias = torch.zeros(batch.mask.shape, dtype=features.dtype, device=features.device).masked_fill_(~batch.mask, -1e4)
    hidden = model.model.language_model(
        inputs_embeds=embedded, attention_mask=bias, position_ids=batch.positions, use_cache=False
    ).last_hidden_state
    chosen = batch.targets >= 0
    return model.lm_head(hidden[chosen]).float(), batch.targets[chosen]


def packed_accuracy(model: LlavaForConditionalGeneration, batches: Iterable[Batch]) -> dict[str, float]:
    """Accuracy by family: an answer counts when every token of it, and its end, is the model's first choice."""
    hits: dict[str, list[bool]] = defaultdict(list)
    with torch.no_grad():
        for batch in batches:
            logits, targets = answer_logits(model, batch.to(model.device))
            right = (logits.argmax(-1) == targets).split([length for _, length in batch.spans])
            for (family, _), tokens in zip(batch.spans, right, strict=True):
                hits[family].append(bool(tokens.all()))
    result = {family: float(np.mean(h)) for family, h in sorted(hits.items())}
    return {"overall": float(np.mean([x for h in hits.values() for x in h])), **result}


def make_optimizers(
    parameters: dict[str, nn.Parameter], muon_lr: float, adam_lr: float, reduced: bool
) -> list[torch.optim.Optimizer]:
    """Muon for the weight matrices inside the blocks, AdamW for embeddings, norms and biases."""
    matrices = [p for n, p in parameters.items() if p.ndim == 2 and "embed" not in n and "heads" not in n]
    chosen = {id(p) for p in matrices}
    others = [p for p in parameters.values() if id(p) not in chosen]
    muon = partial(torch.optim.Muon, adjust_lr_fn="match_rms_adamw") if reduced else partial(Muon, momentum=MOMENTUM)
    optimizers: list[torch.optim.Optimizer] = [
        muon(matrices, lr=muon_lr, weight_decay=0.02),
        torch.optim.AdamW(others, lr=adam_lr, weight_decay=0.0, betas=(0.9, 0.98)),
    ]
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["peak_lr"] = group["lr"]
    return optimizers


def set_progress(optimizers: list[torch.optim.Optimizer], step: int, steps: int, rise_steps: int) -> None:
    """Linear rise over the first `rise_steps`, a flat stretch, and a linear fall over the last 45% of the steps."""
    rise = min(1.0, (step + 1) / rise_steps)
    fall = min(1.0, (steps - step) / (steps * 0.45))
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["peak_lr"] * max(0.02, min(rise, fall))


def arithmetic(model: LlavaForConditionalGeneration, reduced: bool) -> torch.autocast:
    """Matrices are multiplied in bfloat16 if `reduced`, which is slow where a CPU only emulates it."""
    return torch.autocast(model.device.type, torch.bfloat16, enabled=reduced)


def warm_up(
    model: LlavaForConditionalGeneration,
    heads: nn.Module,
    draw: Callable[[int], tuple[torch.Tensor, ...]],
    steps: int,
    log: Callable[[dict], None],
    reduced: bool = True,
) -> None:
    """Trains the vision tower and the projector with the heads.

    `draw` gives a step's pixels [P, 3, 48, 48] and what the heads get beside the image tokens, of which they make the
    loss [] and the share of right answers [].
    """
    heads = heads.to(model.device)
    parameters = {
        **{f"tower.{n}": p for n, p in model.model.vision_tower.named_parameters() if "post_layernorm" not in n},
        **{f"projector.{n}": p for n, p in model.model.multi_modal_projector.named_parameters()},
        **{f"heads.{n}": p for n, p in heads.named_parameters()},
    }
    optimizers = make_optimizers(parameters, muon_lr=2e-3, adam_lr=2e-3, reduced=reduced)
    for step in range(steps):
        pixels, *wanted = (tensor.to(model.device) for tensor in draw(step))
        set_progress(optimizers, step, steps, rise_steps=18)
        with arithmetic(model, reduced):
            loss, right = heads(image_features(model, pixels), *wanted)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if step % 20 == 0 or step == steps - 1:
            log({"stage": "warm-up", "step": step, "loss": round(loss.item(), 4), "right": round(right.item(), 3)})
    with torch.no_grad():  # image tokens of root mean square 0.5, beside which word embeddings are not negligible
        scale = 0.5 / image_features(model, pixels).pow(2).mean().sqrt()
        for parameter in model.model.multi_modal_projector.linear_2.parameters():
            parameter.mul_(scale)


def log_to(path: Path, stream: TextIO = sys.stdout) -> Callable[[dict], None]:
    """Records as lines of the file and of the stream, each with the seconds since now."""
    began = time.monotonic()

    def log(record: dict) -> None:
        line = json.dumps({"seconds": round(time.monotonic() - began, 1), **record})
        print(line, file=stream, flush=True)
        with path.open("a") as file:
            file.write(line + "\n")

    return log


@dataclass(frozen=True)
class Training:
    """How a model is trained, and where its state is kept, so that another process can go on from it."""

    state: Path
    steps: int
    check_every: int
    lr: float
    rise_steps: int = 90  # over which the rate rises
    compiled: bool = False
    reduced: bool = True


def train(
    model: LlavaForConditionalGeneration,
    training: Training,
    warm: Callable[[], None],
    draw: Callable[[int], Batch],
    check: Callable[[], dict[str, float]],
    log: Callable[[dict], None],
) -> None:
    """Both stages: `warm` first, unless there is a state, then the text model on the batches that `draw` gives."""
    model.train()
    text = {f"text.{n}": p for n, p in model.model.language_model.named_parameters()}
    optimizers = make_optimizers(text, muon_lr=training.lr, adam_lr=training.lr, reduced=training.reduced)

    def save(step: int) -> None:
        states = {"model": model.state_dict(), "optimizers": [o.state_dict() for o in optimizers], "step": step}
        torch.save(states, training.state.with_suffix(".tmp"))
        os.replace(training.state.with_suffix(".tmp"), training.state)

    if training.state.exists():
        state = torch.load(training.state, weights_only=True, map_location=model.device)
        model.load_state_dict(state["model"])
        for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        first = state["step"]
        log({"stage": "main", "resumed_at": first})
    else:
        warm()
        first = 0
        save(first)
    compute = torch.compile(answer_logits) if training.compiled else answer_logits
    for step in range(first, training.steps):
        batch = draw(step).to(model.device)
        set_progress(optimizers, step, training.steps, training.rise_steps)
        with arithmetic(model, training.reduced):
            logits, targets = compute(model, batch)
            loss = F.cross_entropy(logits, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if step % 10 == 0:
            log({"stage": "main", "step": step, "loss": round(loss.item(), 4)})
        if (step + 1) % training.check_every == 0 or step + 1 == training.steps:
            log({"stage": "main", "step": step + 1, **{k: round(v, 3) for k, v in check().items()}})
            save(step + 1)
    model.eval()
