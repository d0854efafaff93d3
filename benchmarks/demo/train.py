"""Trains the demo model from scratch: `python -m benchmarks.demo.train`. Run it again to resume where it stopped.

Two stages: the vision tower and projector learn to name what is in each grid cell (a warm-up; its heads are thrown
away), then the text model learns to answer about the image tokens, which stay as they are: trained further they lose
what few questions ask about. Every batch is drawn from its step number, so a resumed run sees the same ones.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections import defaultdict
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from transformers import LlavaForConditionalGeneration, PreTrainedTokenizerFast

from benchmarks.demo import model as m
from benchmarks.demo.packing import Batch, make_batch, normalise
from benchmarks.demo.questions import COPY_WORDS, FAMILIES, ask
from benchmarks.demo.scenes import COLOURS, SHAPES, SIZES, Scene, random_scene, render
from server.demo import CHECKPOINT

SEED = 20
WEIGHTS = {
    "colour": 1.0,
    "shape": 1.0,
    "size": 1.0,
    "position": 1.2,
    "count": 1.6,
    "presence": 1.2,
    "comparison": 1.8,
    "copy": 0.8,
    "rename": 1.0,
}
ROWS = {"separate": 24, "conversations": 5, "exemplars": 3}


class CellHeads(nn.Module):
    """Linear read-outs of each image token for the warm-up.

    Colour, shape and size of the token's cell, which cell it is, and its own patch at half resolution (so that a token
    keeps more than the names of shapes, and pictures of another domain stay distinguishable).
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(width, n) for n in (1 + len(COLOURS), 1 + len(SHAPES), 1 + len(SIZES), 9))
        self.patch_head = nn.Linear(width, 3 * (m.PATCH // 2) ** 2)
        side = torch.arange(6) // 2
        self.register_buffer("cell", (side[:, None] * 3 + side[None, :]).flatten())  # [36]: the cell of each token

    def forward(
        self, features: torch.Tensor, cells: torch.Tensor, pixels: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """features [N, 36, d], cells [N, 9, 3], pixels [N, 3, 48, 48] -> loss [], share of objects all right []."""
        labels = torch.cat([cells[:, self.cell], self.cell[None, :, None].expand(len(cells), -1, 1)], dim=-1)
        logits = [head(features) for head in self.heads]
        loss = sum(F.cross_entropy(x.flatten(0, 1).float(), labels[..., i].flatten()) for i, x in enumerate(logits))
        patches = F.unfold(F.avg_pool2d(pixels, 2), m.PATCH // 2, stride=m.PATCH // 2).transpose(1, 2)
        loss = loss + F.mse_loss(self.patch_head(features).float(), patches)
        right = torch.stack([x.argmax(-1) == labels[..., i] for i, x in enumerate(logits)]).all(0)
        return loss, right[labels[..., 0] > 0].float().mean()


def cell_labels(scene: Scene) -> np.ndarray:
    """`[9, 3] int64`: colour, shape and size of each cell, 0 for empty."""
    labels = np.zeros((9, 3), np.int64)
    for t in scene.things:
        labels[t.cell] = 1 + list(COLOURS).index(t.colour), 1 + SHAPES.index(t.shape), 1 + SIZES.index(t.size)
    return labels


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


def evaluate_packed(model, tokenizer, rows: int, seed: int, split: str = "validation") -> dict[str, float]:
    """Accuracy by family: an answer counts when every token of it, and its end, is the model's first choice."""
    hits: dict[str, list[bool]] = defaultdict(list)
    with torch.no_grad(), torch.autocast(model.device.type, torch.bfloat16):
        for start in range(0, rows, 32):
            batch = make_batch(tokenizer, np.random.default_rng([seed, start]), split, dict.fromkeys(FAMILIES, 1.0), 32)
            logits, targets = answer_logits(model, batch.to(model.device))
            right = (logits.argmax(-1) == targets).split([length for _, length in batch.spans])
            for (family, _), tokens in zip(batch.spans, right, strict=True):
                hits[family].append(bool(tokens.all()))
    result = {family: float(np.mean(h)) for family, h in sorted(hits.items())}
    return {"overall": float(np.mean([x for h in hits.values() for x in h])), **result}


def make_optimizers(parameters: dict[str, nn.Parameter], muon_lr: float, adam_lr: float) -> list[torch.optim.Optimizer]:
    """Muon for the weight matrices inside the blocks, AdamW for embeddings, norms and biases."""
    matrices = [p for n, p in parameters.items() if p.ndim == 2 and "embed" not in n and "heads" not in n]
    chosen = {id(p) for p in matrices}
    others = [p for p in parameters.values() if id(p) not in chosen]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.Muon(matrices, lr=muon_lr, weight_decay=0.02, adjust_lr_fn="match_rms_adamw"),
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


def warm_up(model, steps: int, rows: int, log) -> None:
    device = model.device
    heads = CellHeads(model.config.text_config.hidden_size).to(device)
    parameters = {
        **{f"tower.{n}": p for n, p in model.model.vision_tower.named_parameters() if "post_layernorm" not in n},
        **{f"projector.{n}": p for n, p in model.model.multi_modal_projector.named_parameters()},
        **{f"heads.{n}": p for n, p in heads.named_parameters()},
    }
    optimizers = make_optimizers(parameters, muon_lr=2e-3, adam_lr=2e-3)
    for step in range(steps):
        rng = np.random.default_rng([SEED, 1, step])
        scenes = [random_scene(rng, "train", low=1, high=6) for _ in range(rows)]
        cells = torch.from_numpy(np.stack([cell_labels(s) for s in scenes])).to(device)
        set_progress(optimizers, step, steps, rise_steps=18)
        pixels = normalise([render(s) for s in scenes]).to(device)
        with torch.autocast(device.type, torch.bfloat16):
            loss, right = heads(image_features(model, pixels), cells, pixels)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if step % 20 == 0 or step == steps - 1:
            scores = {"loss": round(loss.item(), 4), "cells_right": round(right.item(), 3)}
            log({"stage": "warm-up", "step": step, **scores})
    with torch.no_grad():  # image tokens of root mean square 0.5, beside which word embeddings are not negligible
        scale = 0.5 / image_features(model, pixels).pow(2).mean().sqrt()
        for parameter in model.model.multi_modal_projector.linear_2.parameters():
            parameter.mul_(scale)


def build_demo_tokenizer() -> PreTrainedTokenizerFast:
    rng = np.random.default_rng([SEED, 0])
    scenes = [random_scene(rng, "train") for _ in range(1000)]
    questions = [ask(rng, scene, family) for scene in scenes for family in FAMILIES]
    return m.build_tokenizer([text for q in questions if q is not None for text in q], COPY_WORDS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("build/demo"), help="logs and resumable state")
    parser.add_argument("--output", type=Path, default=CHECKPOINT, help="where the finished checkpoint goes")
    parser.add_argument("--warm-up-steps", type=int, default=600)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--check-every", type=int, default=100, help="steps between validation, with the state saved")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True, help="a third faster")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    args.work.mkdir(parents=True, exist_ok=True)
    state_path, log_path = args.work / "state.pt", args.work / "log.jsonl"
    began = time.monotonic()

    def log(record: dict) -> None:
        line = json.dumps({"seconds": round(time.monotonic() - began, 1), **record})
        print(line, flush=True)
        with log_path.open("a") as file:
            file.write(line + "\n")

    tokenizer = build_demo_tokenizer()
    model = m.build_model(SEED).to(args.device)
    model.train()
    text = {f"text.{n}": p for n, p in model.model.language_model.named_parameters()}
    optimizers = make_optimizers(text, muon_lr=args.lr, adam_lr=args.lr)

    def save(step: int) -> None:
        states = {"model": model.state_dict(), "optimizers": [o.state_dict() for o in optimizers], "step": step}
        torch.save(states, state_path.with_suffix(".tmp"))
        os.replace(state_path.with_suffix(".tmp"), state_path)

    if state_path.exists():
        state = torch.load(state_path, weights_only=True, map_location=args.device)
        model.load_state_dict(state["model"])
        for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        first = state["step"]
        log({"stage": "main", "resumed_at": first})
    else:
        warm_up(model, args.warm_up_steps, 64, log)
        first = 0
        save(first)
    compute = torch.compile(answer_logits) if args.compile else answer_logits
    for step in range(first, args.steps):
        batch = make_batch(tokenizer, np.random.default_rng([SEED, 2, step]), "train", WEIGHTS, **ROWS).to(args.device)
        set_progress(optimizers, step, args.steps, rise_steps=90)
        with torch.autocast(args.device, torch.bfloat16):
            logits, targets = compute(model, batch)
            loss = F.cross_entropy(logits, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if step % 10 == 0:
            log({"stage": "main", "step": step, "loss": round(loss.item(), 4)})
        if (step + 1) % args.check_every == 0 or step + 1 == args.steps:
            scores = evaluate_packed(model, tokenizer, 96, seed=7)
            log({"stage": "main", "step": step + 1, **{k: round(v, 3) for k, v in scores.items()}})
            save(step + 1)
    model.eval()
    m.export(model, tokenizer, args.output)


if __name__ == "__main__":
    main()
