"""A method of one's own.

    python -m benchmarks.research.continual run --method own_method:WordBias --answer offline ...

It adds a number to the logit of each word of the vocabulary, larger for words of the answers that it was taught.
"""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from safetensors.torch import load_file, save_file

from benchmarks.research.continual.methods.method import Artifact, Kind, RunContext
from benchmarks.research.continual.suites import TaskData
from selector.backbone.model import Backbone

FILE = "bias.safetensors"


@dataclass(frozen=True)
class WordBias:
    """A frozen dataclass: its fields are the settings, which `--set own_word_bias.strength=2` changes."""

    kind: ClassVar[Kind] = "attached"
    name: str = "own_word_bias"
    strength: float = 1.0

    def learn(self, task: TaskData, previous: Path | None, out: Path, context: RunContext) -> Artifact:
        backbone = Backbone.load(context.model)
        texts = [example.answer for example in task.train]
        counts = Counter(token for ids in backbone.tokenizer(texts)["input_ids"] for token in ids)
        bias = torch.zeros(backbone.model.config.get_text_config().vocab_size)
        if previous is not None:
            bias = load_file(previous / FILE)["bias"].clone()
        for token, count in counts.items():
            bias[token] += self.strength * count / counts.total()
        save_file({"bias": bias}, out / FILE)
        return Artifact(self.kind, FILE, bias.nbytes, {"words": len(counts)}, attach=f"{__name__}:attach")


def attach(backbone: Backbone, path: Path) -> None:
    """Changes the model in place; called once before it answers."""
    bias = load_file(path)["bias"]
    head = backbone.model.get_output_embeddings()
    head.register_forward_hook(lambda module, inputs, logits: logits + bias.to(logits))
