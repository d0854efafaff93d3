"""Trains the demo model from scratch: `python -m benchmarks.demo.train`. Run it again to resume where it stopped.

Two stages: the vision tower and projector learn to name what is in each grid cell (a warm-up; its heads are thrown
away), then the text model learns to answer about the image tokens, which stay as they are: trained further they lose
what few questions ask about. Every batch is drawn from its step number, so a resumed run sees the same ones.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from transformers import PreTrainedTokenizerFast

from benchmarks.demo import model as m
from benchmarks.demo.packing import Batch, make_batch, normalise
from benchmarks.demo.questions import COPY_WORDS, FAMILIES, ask
from benchmarks.demo.scenes import COLOURS, SHAPES, SIZES, Scene, random_scene, render
from benchmarks.demo.stages import Training, arithmetic, log_to, packed_accuracy, train, warm_up
from benchmarks.record import parser_of
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


def evaluate_packed(model, tokenizer, rows: int, seed: int, split: str = "validation") -> dict[str, float]:
    """Accuracy on scenes of the split, overall and by family."""
    batches = (
        make_batch(tokenizer, np.random.default_rng([seed, start]), split, dict.fromkeys(FAMILIES, 1.0), 32)
        for start in range(0, rows, 32)
    )
    with arithmetic(model, reduced=True):
        return packed_accuracy(model, batches)


def labelled_scenes(step: int, rows: int = 64) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A step's pixels [rows, 3, 48, 48] and the labels of its cells [rows, 9, 3]; the heads get the pixels too."""
    rng = np.random.default_rng([SEED, 1, step])
    scenes = [random_scene(rng, "train", low=1, high=6) for _ in range(rows)]
    pixels = normalise([render(s) for s in scenes])
    return pixels, torch.from_numpy(np.stack([cell_labels(s) for s in scenes])), pixels


def build_demo_tokenizer() -> PreTrainedTokenizerFast:
    rng = np.random.default_rng([SEED, 0])
    scenes = [random_scene(rng, "train") for _ in range(1000)]
    questions = [ask(rng, scene, family) for scene in scenes for family in FAMILIES]
    return m.build_tokenizer([text for q in questions if q is not None for text in q], COPY_WORDS)


def main() -> None:
    parser = parser_of(__doc__, has_result=False)
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
    tokenizer = build_demo_tokenizer()
    model = m.build_model(SEED).to(args.device)
    log = log_to(args.work / "log.jsonl")

    def warm() -> None:
        heads = CellHeads(model.config.text_config.hidden_size)
        warm_up(model, heads, labelled_scenes, args.warm_up_steps, log)

    def draw(step: int) -> Batch:
        return make_batch(tokenizer, np.random.default_rng([SEED, 2, step]), "train", WEIGHTS, **ROWS)

    def check() -> dict[str, float]:
        return evaluate_packed(model, tokenizer, 96, seed=7)

    training = Training(args.work / "state.pt", args.steps, args.check_every, args.lr, compiled=args.compile)
    train(model, training, warm, draw, check, log)
    m.export(model, tokenizer, args.output)


if __name__ == "__main__":
    main()
