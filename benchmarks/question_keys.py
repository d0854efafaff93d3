"""What stored questions are found by: the paper's query key, or what a question's own words are in an early layer.

Shapes: n questions, T prompt tokens, d hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import normalize

from inducekv_vllm.backbone.placeholders import placeholder_ids
from inducekv_vllm.backbone.turns import turn_marks
from inducekv_vllm.gate import deciding_tokens
from selector.backbone.extraction import extract_keys
from selector.backbone.model import Backbone
from selector.data.examples import Example

Key = Literal["paper", "early"]
EARLY_LAYER = 2  # after this many layers hidden states are still about words; the last ones are about the template
BATCH_SIZE = 64


def question_keys(backbone: Backbone, examples: Sequence[Example], key: Key) -> Tensor:
    """[n, d] float32, unit norm.

    "paper" is the mean of the last hidden states over the whole prompt (paper, Eq. retrieval_key), "early" that of the
    hidden states after EARLY_LAYER layers over the tokens of the question alone, its pictures' among them.
    """
    if key == "paper":
        return extract_keys(backbone, examples, batch_size=BATCH_SIZE)
    return torch.stack([_early_key(backbone, example) for example in examples])


def _early_key(backbone: Backbone, example: Example) -> Tensor:
    inputs = backbone.encode_example(example)
    tokens = inputs["input_ids"][0].tolist()
    deciding = deciding_tokens(tokens, turn_marks(backbone.processor), placeholder_ids(backbone.model.config))
    with torch.inference_mode():
        states = backbone.model(**inputs, output_hidden_states=True, use_cache=False).hidden_states[EARLY_LAYER]
    return normalize(states[0, [*deciding.text, *deciding.media]].float().mean(0), dim=0)
