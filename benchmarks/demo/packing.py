"""Training batches: every row of tokens holds one or more pictures and several questions, in one of three kinds.

- separate: one picture, many questions, each seeing only the picture: the attention mask and the position ids make
  every question see exactly what it would see as a prompt of its own, which is how the model is served and measured.
- conversation: one picture, the questions follow each other as turns and see what was said before.
- exemplars: several pictures with one question each, seeing what came before, as a prompt with worked examples does.

Shapes: N rows, L tokens a row, P pictures.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from transformers import PreTrainedTokenizerFast

from benchmarks.demo import model as m
from benchmarks.demo.questions import Question, ask
from benchmarks.demo.scenes import Scene, random_scene, render

ROW = 192
PREFIX = [m.USER] + [m.IMAGE] * m.IMAGE_TOKENS
EXEMPLARS = 3  # pictures in a row of exemplars


@dataclass(frozen=True)
class Batch:
    pixels: torch.Tensor  # [P, 3, 48, 48] float32, as the image processor makes them, in the order of the image tokens
    tokens: torch.Tensor  # [N, L] int64
    positions: torch.Tensor  # [N, L] int64
    mask: torch.Tensor  # [N, 1, L, L] bool, True where a row's token may look
    targets: torch.Tensor  # [N, L] int64: the token to predict at each place, -100 where none
    spans: list[tuple[str, int]]  # family and number of targets of every question, in the order of the targets

    def to(self, device: str | torch.device) -> Batch:
        tensors = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "spans"}
        return replace(self, **{name: tensor.to(device) for name, tensor in tensors.items()})


def normalise(pictures: Sequence[np.ndarray]) -> torch.Tensor:
    """`[48, 48, 3] uint8` pictures as `[N, 3, 48, 48] float32` in -1..1."""
    stacked = torch.from_numpy(np.stack(pictures)).permute(0, 3, 1, 2).float()
    return stacked / 127.5 - 1.0


def _drawn_questions(
    rng: np.random.Generator, scenes: Sequence[Scene], weights: dict[str, float]
) -> list[list[tuple[str, Question]]]:
    """For each scene, families drawn by their weights, each with its question and answer."""
    families = list(weights)
    share = np.array([weights[f] for f in families])
    drawn = rng.choice(len(families), size=(len(scenes), 16), p=share / share.sum())
    return [
        [(families[i], q) for i in row if (q := ask(rng, scene, families[i])) is not None]
        for scene, row in zip(scenes, drawn, strict=True)
    ]


def _blocks(
    tokenizer: PreTrainedTokenizerFast, questions: Sequence[Sequence[tuple[str, Question]]]
) -> list[list[tuple[str, list[int], list[int]]]]:
    """For each picture its questions as tokens: (family, those up to the assistant's turn, those of answer and end)."""
    texts = [text for row in questions for _, question in row for text in question]
    ids = iter(tokenizer(texts, add_special_tokens=False)["input_ids"])
    return [[(family, [*next(ids), m.ASSISTANT], [*next(ids), m.END]) for family, _ in row] for row in questions]


class _Row:
    """Fills one row, `[L] int64` each, from the left."""

    def __init__(self, tokens: np.ndarray, positions: np.ndarray, block_of: np.ndarray) -> None:
        self.tokens, self.positions, self.block_of = tokens, positions, block_of
        self.used = 0

    def put(self, piece: list[int], block: int, start: int) -> None:
        span = slice(self.used, self.used + len(piece))
        self.tokens[span], self.block_of[span] = piece, block
        self.positions[span] = np.arange(start, start + len(piece))
        self.used += len(piece)


def make_batch(
    tokenizer: PreTrainedTokenizerFast,
    rng: np.random.Generator,
    split: str,
    weights: dict[str, float],
    separate: int,
    conversations: int = 0,
    exemplars: int = 0,
) -> Batch:
    """Rows of the three kinds over random scenes of `split`, filled with questions until none fits."""
    scenes = [random_scene(rng, split, low=1) for _ in range(separate + conversations + EXEMPLARS * exemplars)]
    questions = _drawn_questions(rng, scenes, weights)
    return pack(tokenizer, [render(s) for s in scenes], questions, separate, conversations, exemplars)


def pack(
    tokenizer: PreTrainedTokenizerFast,
    pictures: Sequence[np.ndarray],
    questions: Sequence[Sequence[tuple[str, Question]]],
    separate: int,
    conversations: int = 0,
    exemplars: int = 0,
) -> Batch:
    """Rows of the three kinds, each filled with its pictures' questions until none fits.

    `pictures`: `[48, 48, 3] uint8`, one a row, `EXEMPLARS` a row of exemplars; `questions`: of each picture, by family.
    """
    rows = separate + conversations + exemplars
    held = [1] * (separate + conversations) + [EXEMPLARS] * exemplars
    blocks = iter(_blocks(tokenizer, questions))

    tokens = np.full((rows, ROW), m.PAD, np.int64)
    positions = np.tile(np.arange(ROW), (rows, 1))
    targets = np.full((rows, ROW), -100, np.int64)
    block_of = np.full((rows, ROW), -1, np.int64)  # what sees what: 0 is seen by all, k > 0 by itself, -1 is padding
    spans: list[tuple[str, int]] = []
    for n in range(rows):
        alone = n < separate
        row = _Row(tokens[n], positions[n], block_of[n])
        for _ in range(held[n]):
            row.put(PREFIX, block=0, start=row.used)
            room = ROW - row.used if held[n] == 1 else ROW // EXEMPLARS - len(PREFIX)
            number = 0
            for family, question, answer in next(blocks):
                turn = [m.USER, *question] if number and not alone else question
                length = len(turn) + len(answer)
                if length > room:
                    continue
                number += 1
                room -= length
                first = row.used + len(turn) - 1
                targets[n, first : first + len(answer)] = answer
                row.put([*turn, *answer], block=number if alone else 0, start=len(PREFIX) if alone else row.used)
                spans.append((family, len(answer)))
                if held[n] > 1:
                    break
    block = torch.from_numpy(block_of)
    causal = torch.ones(ROW, ROW, dtype=torch.bool).tril()
    mask = causal & ((block[:, :, None] == block[:, None, :]) | (block == 0)[:, None, :])
    return Batch(
        pixels=normalise(pictures),
        tokens=torch.from_numpy(tokens),
        positions=torch.from_numpy(positions),
        mask=mask[:, None],
        targets=torch.from_numpy(targets),
        spans=spans,
    )
