"""DER++ on LoRA: rehearsed examples are held to what the model said of them when they came (Buzzega et al., 2020).

    loss of new examples and of rehearsed ones + strength mean squared difference of their log-probabilities

The buffer is a reservoir, as in ER + replay, and stores with each example the log-probabilities of its answer's tokens
after its own task was learned, [answer tokens, vocabulary] float16. The original stores logits at the moment of
insertion; log-probabilities differ from them by a constant for each token. With the stored numbers the buffer takes no
more bytes than a memory of the same budget, so it holds far fewer examples than that of ER.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from benchmarks.fit import Penalty
from benchmarks.research.continual.methods.lora import BUFFER, AdapterTraining, ErReplay
from benchmarks.research.continual.methods.lwf import record
from benchmarks.research.continual.methods.rehearsal import content_bytes, reservoir, store_buffer
from selector.data.examples import Example
from selector.runtime.files import replace_file

SAID = "said.safetensors"


@dataclass(frozen=True)
class DerPlusPlus(ErReplay):
    """Dark experience replay with labels."""

    name: str = "der_plus_plus"
    strength: float = 0.3  # alpha, mammoth's best for CIFAR-100

    def penalty(self, training: AdapterTraining) -> Penalty | None:
        if training.previous is None:
            return None
        said = safetensors.torch.load_file(training.previous / SAID)

        def difference(batch: Sequence[Example], predicted: Sequence[Tensor]) -> Tensor:
            pairs = zip(batch, predicted, strict=True)
            known = [(now, said[key(example)]) for example, now in pairs if key(example) in said]
            terms = [(now - then.float()).square().mean() for now, then in known]
            return self.strength * (torch.stack(terms).mean() if terms else predicted[0].new_zeros(()))

        return difference

    def keep(self, training: AdapterTraining) -> dict[str, Any]:
        allowed, seed = self.bytes_allowed(training.scorer.backbone, training.context), training.context.seed
        said = {} if training.previous is None else safetensors.torch.load_file(training.previous / SAID)
        vocabulary = training.scorer.backbone.model.config.get_text_config().vocab_size

        def size(example: Example) -> int:
            return content_bytes(example) + 2 * len(training.scorer.answer_tokens(example)) * vocabulary

        buffer = reservoir(self.rehearsed(training), training.task.train, allowed, seed, size)
        new = [example for example in buffer if key(example) not in said]
        said |= {
            key(example): said_now.half() for example, said_now in zip(new, record_all(training, new), strict=True)
        }
        kept = {key(example): said[key(example)].contiguous() for example in buffer}
        replace_file(training.out / SAID, safetensors.torch.save(kept))
        store_buffer(training.out / BUFFER, buffer)
        return {"buffer": len(buffer), "buffer_bytes": sum(map(size, buffer)), "buffer_bytes_allowed": allowed}


def key(example: Example) -> str:
    return f"{example.task} {example.id}"


def record_all(training: AdapterTraining, examples: Sequence[Example]) -> list[Tensor]:
    found = record(training.scorer, examples)
    return [found[example.id] for example in examples]
