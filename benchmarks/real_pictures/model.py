"""Where the trained model is kept, its tokenizer, and what its training begins with: the demo model."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np
import torch
from transformers import AutoTokenizer, LlavaForConditionalGeneration, PreTrainedTokenizerFast

from benchmarks.demo import model as m
from benchmarks.real.model import cache_folder
from benchmarks.real_pictures.concepts import Concept
from benchmarks.real_pictures.questions import FAMILIES
from server.demo import CHECKPOINT

NAME: Final = "real-pictures"
LOG: Final = "training.jsonl"  # of the training, beside the weights


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
