"""Vectors of words are the same, whatever the cache holds."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from inducekv_vllm.backbone.word_vectors import WordVectors

from inducekv_vllm.backbone import word_vectors

EMBEDDINGS = torch.randn(26, 8, generator=torch.Generator().manual_seed(0))
CACHED = 5


def tokenizer(words: list[str], add_special_tokens: bool) -> dict[str, list[list[int]]]:
    return {"input_ids": [[ord(letter) - ord("a") for letter in word.strip()] for word in words]}


WORDS = st.text("abcdefghij", min_size=1, max_size=2)


@given(st.lists(st.lists(WORDS, min_size=1, max_size=3 * CACHED), min_size=1, max_size=12))
def test_they_do_not_depend_on_what_was_asked_before(requests: list[list[str]]) -> None:
    """In a cache that one request may overflow, and all of them do."""
    of_letters: Any = tokenizer
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(word_vectors, "CACHED_WORDS", CACHED)
        vectors = WordVectors(of_letters, EMBEDDINGS)
        for words in requests:
            expected = np.stack([WordVectors(of_letters, EMBEDDINGS)([word])[0] for word in words])
            np.testing.assert_allclose(vectors(words), expected, rtol=0, atol=1e-6)
            assert len(vectors._cached) <= CACHED
