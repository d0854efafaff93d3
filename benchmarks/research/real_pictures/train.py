"""Trains a model that knows what half of the concepts look like: `python -m benchmarks.research.real_pictures.train`.

It continues the demo model, on training vendors' drawings of base concepts, in the demo's two stages: the vision tower
with heads for names and groups, then the text model. Every batch is drawn from its step number. Run it again to resume
the second stage where it stopped; it prints the checkpoint's folder, and does nothing else if that is there.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from transformers import AutoTokenizer, LlavaForConditionalGeneration, PreTrainedTokenizerFast

from benchmarks.demo import model as m
from benchmarks.demo.packing import EXEMPLARS, Batch, normalise, pack
from benchmarks.demo.questions import Question, pick
from benchmarks.demo.stages import Training, log_to, packed_accuracy, train, warm_up
from benchmarks.locks import locked
from benchmarks.real.model import cache_folder
from benchmarks.real.sources import Packages
from benchmarks.research.real_pictures.concepts import GROUPS, Concept, Concepts
from benchmarks.research.real_pictures.drawings import drawing, picture, restyled
from benchmarks.research.real_pictures.icons import PACKAGES, Role
from benchmarks.research.real_pictures.questions import COPY, FAMILIES, copy, vocabulary
from benchmarks.research.real_pictures.stream import installed_concepts
from inducekv_vllm.errors import ConfigError
from server.demo import CHECKPOINT

NAME: Final = "real-pictures"
LOG: Final = "training.jsonl"  # of the training, beside the weights
SEED: Final = 20
STEPS: Final = 500  # of the second stage; what older trainings took without recording it
STRENGTH: Final = 1.5  # of the changes to training pictures; 1 in the tasks
ROWS: Final = {"separate": 5, "conversations": 1, "exemplars": 1}
TRAINED_FAMILIES: Final = (*FAMILIES, "name", "claim", COPY)  # drawn evenly: names and claims more often
TAUGHT: Final = "taught.json"  # what a training is of
QUESTIONS: Final = 20  # of a picture: as many as a row may hold


def model_folder(cache: Path | None = None) -> Path:
    """The checkpoint's folder; it is there once the model is trained."""
    return (cache or cache_folder()) / NAME


def build_tokenizer(base: Sequence[Concept], words: Sequence[str], seed: int) -> PreTrainedTokenizerFast:
    """One in which nearly every word of a question or an answer is a single token."""
    rng = np.random.default_rng([seed, 0])
    texts = [text for ask in FAMILIES.values() for concept in base for text in ask(rng, concept, base)]
    return m.build_tokenizer(texts, {*words, *(word for text in texts for word in re.findall("[A-Za-z]+", text))})


def from_demo(tokenizer: PreTrainedTokenizerFast, seed: int) -> LlavaForConditionalGeneration:
    """The demo model with another vocabulary: a token that both have keeps its embedding, the others are drawn."""
    model = m.build_model(seed)
    drawn = model.get_input_embeddings().weight.detach().clone()
    model.load_state_dict(LlavaForConditionalGeneration.from_pretrained(CHECKPOINT, dtype=torch.float32).state_dict())
    embeddings = model.get_input_embeddings().weight
    old, known = embeddings.detach().clone(), AutoTokenizer.from_pretrained(CHECKPOINT).get_vocab()
    with torch.no_grad():
        for token, row in tokenizer.get_vocab().items():
            embeddings[row] = old[known[token]] if token in known else drawn[row]
    return model


class PictureHeads(nn.Module):
    """Linear read-outs of the mean image token for the warm-up: the concept and its group."""

    def __init__(self, width: int, concepts: int) -> None:
        super().__init__()
        self.heads = nn.ModuleList((nn.Linear(width, concepts), nn.Linear(width, len(GROUPS))))

    def forward(self, features: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """features [P, 36, d], labels [P, 2] -> loss [], share of concepts right []."""
        names, groups = (head(features.mean(1)) for head in self.heads)
        loss = F.cross_entropy(names, labels[:, 0], label_smoothing=0.1)
        loss = loss + 0.3 * F.cross_entropy(groups, labels[:, 1])
        return loss, (names.argmax(-1) == labels[:, 0]).float().mean()


class Lessons:
    """Training batches, each drawn from its step number."""

    def __init__(self, concepts: Concepts, words: Sequence[str], tokenizer: PreTrainedTokenizerFast) -> None:
        self.concepts, self.words, self.tokenizer = concepts, words, tokenizer

    def labelled(self, step: int, rows: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
        """Pixels [rows, 3, 48, 48] and the numbers of concept and group [rows, 2]."""
        rng = np.random.default_rng([SEED, 1, step])
        chosen = rng.integers(len(self.concepts.base), size=rows).tolist()
        drawn = [self.concepts.base[number] for number in chosen]
        labels = [(number, list(GROUPS).index(c.group)) for number, c in zip(chosen, drawn, strict=True)]
        return normalise([self._picture(rng, c, "train", STRENGTH) for c in drawn]), torch.tensor(labels)

    def packed(self, step: int) -> Batch:
        return self._batch(np.random.default_rng([SEED, 2, step]), "train", STRENGTH, TRAINED_FAMILIES, **ROWS)

    def asked(self, number: int, role: Role) -> Batch:
        """Questions of the measured families, evenly, without earlier turns."""
        return self._batch(np.random.default_rng([SEED, 3, number]), role, 1.0, tuple(FAMILIES), separate=16)

    def _batch(
        self, rng: np.random.Generator, role: Role, strength: float, families: Sequence[str], separate: int, **more: int
    ) -> Batch:
        number = separate + more.get("conversations", 0) + EXEMPLARS * more.get("exemplars", 0)
        drawn = [pick(rng, self.concepts.base) for _ in range(number)]
        pictures = [self._picture(rng, concept, role, strength) for concept in drawn]
        questions = [[self._ask(rng, concept, families) for _ in range(QUESTIONS)] for concept in drawn]
        return pack(self.tokenizer, pictures, questions, separate, **more)

    def _ask(self, rng: np.random.Generator, concept: Concept, families: Sequence[str]) -> tuple[str, Question]:
        family = pick(rng, families)
        if family == COPY:
            return family, copy(rng, self.words)
        return family, FAMILIES[family](rng, concept, self.concepts.base)

    def _picture(self, rng: np.random.Generator, concept: Concept, role: Role, strength: float) -> np.ndarray:
        drawn = drawing(pick(rng, self.concepts.drawn_by(role, concept)), concept.name)
        return picture(restyled(drawn, rng) if role == "train" else drawn, rng, strength)


def train_model(cache: Path, warm_up_steps: int, steps: int, check_every: int) -> Path:
    """The checkpoint's folder, whole or absent. One process trains, and others wait for it.

    Raises:
        ConfigError: a package is missing, or what is there was trained on something else.
        OSError: the cache cannot be written.
    """
    if (model_folder(cache) / "config.json").is_file():  # perhaps in a folder that cannot be written
        return resume_training(cache, warm_up_steps, steps, check_every)
    cache.mkdir(parents=True, exist_ok=True)
    with locked(cache / f".{NAME}.lock"):
        return resume_training(cache, warm_up_steps, steps, check_every)


def resume_training(cache: Path, warm_up_steps: int, steps: int, check_every: int) -> Path:
    """See `train_model`; this process has the cache's training for itself."""
    folder, work = model_folder(cache), model_folder(cache).with_name(f"{NAME}.training")
    concepts = installed_concepts(cache)
    words = vocabulary(concepts.base, Packages())
    of = taught(concepts, words, warm_up_steps, steps)
    require_taught(folder, of)
    if (folder / "config.json").is_file():
        return folder
    require_taught(work, of)
    work.mkdir(parents=True, exist_ok=True)
    (work / TAUGHT).write_text(json.dumps(of))
    tokenizer = build_tokenizer(concepts.base, words, SEED)
    model = from_demo(tokenizer, SEED)
    lessons = Lessons(concepts, words, tokenizer)
    log = log_to(work / LOG, sys.stderr)

    def warm() -> None:
        heads = PictureHeads(model.config.text_config.hidden_size, len(concepts.base))
        warm_up(model, heads, lessons.labelled, warm_up_steps, log, reduced=False)

    def check() -> dict[str, float]:
        return packed_accuracy(model, [lessons.asked(number, "validation") for number in range(2)])

    training = Training(work / "state.pt", steps, check_every, lr=2e-3, rise_steps=20, reduced=False)
    train(model, training, warm, lessons.packed, check, log)
    staging = work / "checkpoint"
    m.export(model, tokenizer, staging)
    for name in (LOG, TAUGHT):
        shutil.copy(work / name, staging / name)
    staging.rename(folder)
    shutil.rmtree(work)
    return folder


def taught(concepts: Concepts, words: Sequence[str], warm_up_steps: int, steps: int) -> dict[str, Any]:
    """What a training is of. A state or a checkpoint of something else cannot stand for it."""
    return {
        "packages": {package.requirement: package.role for package in PACKAGES},
        "base": [concept.name for concept in concepts.base],
        "words": list(words),
        "warm_up_steps": warm_up_steps,
        "steps": steps,
        "seed": SEED,
    }


def require_taught(folder: Path, of: dict[str, Any]) -> None:
    """Raises ConfigError: the folder holds a state or a checkpoint of another training."""
    if not folder.exists():
        return
    try:
        found = {"steps": STEPS} | json.loads((folder / TAUGHT).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        found = {}
    if different := [name for name in of if found.get(name) != of[name]]:
        raise ConfigError(f"{folder} was trained with other {', '.join(different)}: remove it, or use another --cache")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", type=Path, default=cache_folder(), help="where all of it is kept (%(default)s)")
    parser.add_argument("--warm-up-steps", type=int, default=1200)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--check-every", type=int, default=50, help="steps between validation, with the state saved")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    try:
        folder = train_model(options.cache, options.warm_up_steps, options.steps, options.check_every)
    except (ConfigError, OSError) as error:
        print(f"benchmarks.research.real_pictures.train: error: {error}", file=sys.stderr)
        return 2
    print(folder)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
