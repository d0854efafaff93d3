"""Embeddings of words: sums of a checkpoint's input embeddings, read from its file. No model is loaded.

Numbers and emoji are like nothing but themselves: what they are made of, digits and bytes, would make 481 and 418 one.

Shapes: V vocabulary, d hidden size, n words.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from threading import Lock
from typing import Final

import numpy as np
import torch
from cachetools import LRUCache
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.nn.functional import normalize
from transformers import PreTrainedTokenizerBase

from ..errors import UnsupportedModel
from ..facts import own_direction
from ..retrieval.entry_terms import FloatArray
from .weights import stored_tensors

NAMES: Final = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "tok_embeddings.weight")
CACHED_WORDS: Final = 4096


class WordVectors:
    """The embedding of a word: the sum of its tokens', each of norm 1, to norm 1."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, embeddings: Tensor) -> None:
        """`embeddings` [V, d], any float type."""
        self._tokenizer, self._embeddings = tokenizer, embeddings
        self._cached: LRUCache[str, FloatArray] = LRUCache(CACHED_WORDS)
        self._lock = Lock()

    @classmethod
    def of(
        cls,
        tokenizer: PreTrainedTokenizerBase,
        model: str | Path,
        revision: str | None = None,
        cache: str | None = None,
    ) -> WordVectors:
        """Of a checkpoint, whose embeddings stay on the disk until they are needed.

        Raises:
            UnsupportedModel: it has no input embeddings that could be told from its other tensors.
        """
        return cls(tokenizer, input_embeddings(model, revision, cache))

    def __call__(self, words: Sequence[str]) -> FloatArray:
        """[n, d] float32, of norm 1. Any thread may call it: a bundle is loaded while another one is asked."""
        with self._lock:
            cached = {word: self._cached.get(word) for word in words}
        found = {word: vector for word, vector in cached.items() if vector is not None}
        if new := [word for word in cached if word not in found]:
            computed = dict(zip(new, self._compute(new), strict=True))
            found |= computed  # the cache may not hold all of them at once
            if len(cached) <= CACHED_WORDS:
                with self._lock:
                    self._cached.update(computed)
        return np.stack([found[word] for word in words])

    def _compute(self, words: Sequence[str]) -> FloatArray:
        # As it stands behind another word; for many vocabularies the first word of a text is another token.
        ids = self._tokenizer([f" {word}" for word in words], add_special_tokens=False)["input_ids"]
        lengths = torch.tensor([len(each) for each in ids])
        flat = torch.tensor([token for each in ids for token in each], dtype=torch.int64)
        rows = normalize(self._embeddings[flat].float(), dim=1)
        owners = torch.repeat_interleave(torch.arange(len(ids)), lengths)
        sums = torch.zeros(len(ids), rows.shape[1]).index_add_(0, owners, rows)
        vectors: FloatArray = normalize(sums, dim=1).numpy()
        for place, word in enumerate(words):
            if not word.isalpha():
                vectors[place] = own_direction(word, vectors.shape[1])
        return vectors


def input_embeddings(model: str | Path, revision: str | None = None, cache: str | None = None) -> Tensor:
    """A checkpoint's input embeddings [V, d], mapped from its file.

    Raises:
        UnsupportedModel: there are none, or several.
    """
    stored = stored_tensors(model, revision, cache)
    names = [name for name in stored if name.endswith(NAMES)]
    if len(names) != 1:
        raise UnsupportedModel(
            f"{model}: facts are found by input embeddings: expected one tensor {' or '.join(NAMES)}, found {names}"
        )
    try:
        with safe_open(stored[names[0]], framework="pt") as file:
            embeddings: Tensor = file.get_tensor(names[0])
    except (OSError, SafetensorError) as error:
        raise UnsupportedModel(f"{model}: cannot read {names[0]}: {error}") from error
    return embeddings
