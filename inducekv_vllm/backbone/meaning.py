"""Which stored questions mean what a request says, by a sentence encoder: candidates for a judge, nothing more.

A text's vector is the mean of the encoder's last hidden states over its tokens, of length 1.

Shapes: n texts, N stored questions, T tokens, d features.
"""

from collections.abc import Sequence
from pathlib import Path
from threading import Lock
from typing import Any, Final, NamedTuple

import faiss
import numpy as np
import torch
from cachetools import LRUCache
from transformers import AutoModel, PreTrainedTokenizerBase
from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

from ..errors import UnsupportedModel
from ..retrieval.entry_terms import FloatArray
from .checkpoints import any_config, load_tokenizer, require_model_folder, summary

AT_ONCE: Final = 8
KEPT_VECTORS: Final = 1 << 17
COMPARED: Final = 16  # stored questions that are nearest to a request
LIKE: Final = 0.5  # cosine of those that may ask the same
LONGEST: Final = 512  # tokens of a text; one that is judged has fewer


class _Loaded(NamedTuple):
    encoder: Any
    tokenizer: PreTrainedTokenizerBase
    longest: int  # tokens


class SentenceEncoder:
    """See the module docstring. Any thread may use it; its weights are loaded the first time."""

    def __init__(self, model: str) -> None:
        """
        Args:
            model: a folder, or an id of the hub, which is read when it is loaded.

        Raises:
            UnsupportedModel: there is no such folder, or it holds no encoder with its tokenizer.
        """
        require_model_folder(model)
        self._model = model
        self._lock = Lock()
        self._loaded: _Loaded | None = None
        self._vectors: LRUCache[str, FloatArray] = LRUCache(KEPT_VECTORS)
        if Path(model).is_dir():
            _read(model)

    def vectors(self, texts: Sequence[str]) -> FloatArray:
        """[n, d] float32, of one text at least; those that it had lately are kept.

        Raises:
            UnsupportedModel: the encoder cannot be loaded.
        """
        with self._lock:
            found = {text: self._vectors[text] for text in texts if text in self._vectors}
        new = [text for text in dict.fromkeys(texts) if text not in found]
        for at in range(0, len(new), AT_ONCE):
            part = new[at : at + AT_ONCE]
            vectors = dict(zip(part, self._encoded(part), strict=True))
            found.update(vectors)
            with self._lock:
                self._vectors.update(vectors)
        return np.stack([found[text] for text in texts])

    def _encoded(self, texts: Sequence[str]) -> FloatArray:
        encoder, tokenizer, longest = self._load()
        options = {"padding": True, "truncation": True, "max_length": longest, "return_tensors": "pt"}
        batch = tokenizer(list(texts), **options).to(encoder.device)
        with torch.inference_mode():
            hidden = encoder(**batch).last_hidden_state.float()  # [n, T, d]
            mask = batch["attention_mask"][..., None]  # [n, T, 1]
            mean = (hidden * mask).sum(1) / mask.sum(1).clamp(min=1)
            vectors: FloatArray = torch.nn.functional.normalize(mean, dim=-1).cpu().numpy()
        return vectors

    def _load(self) -> _Loaded:
        with self._lock:
            if self._loaded is None:
                self._loaded = _loaded(self._model)
            return self._loaded


class MeaningIndex:
    """Of the questions of a version, by their places."""

    def __init__(self, encoder: SentenceEncoder, texts: Sequence[str]) -> None:
        """
        Args:
            texts: [N], at least one; their vectors are computed here.

        Raises:
            UnsupportedModel: as for `SentenceEncoder.vectors`.
        """
        self._encoder = encoder
        vectors = encoder.vectors(texts)
        self._index = faiss.IndexFlatIP(vectors.shape[1])
        self._index.add(vectors)

    def nearest(self, text: str) -> list[int]:
        """The places of the questions that may mean what a text says, the nearest first."""
        (likeness,), (places,) = self._index.search(self._encoder.vectors([text]), COMPARED)
        return [int(place) for each, place in zip(likeness, places, strict=True) if place >= 0 and each >= LIKE]


def _loaded(model: str) -> _Loaded:
    tokenizer, positions = _read(model)
    try:
        encoder, found = AutoModel.from_pretrained(
            model, dtype=torch.float32, trust_remote_code=False, output_loading_info=True
        )
        if missing := sorted(key for key in found["missing_keys"] if not key.startswith("pooler.")):
            raise ValueError(f"its weights lack {missing[0]}")
        encoder.eval().to("cuda" if torch.cuda.is_available() else "cpu")
    except Exception as error:
        raise UnsupportedModel(f"{model}: cannot load the encoder: {summary(error)}") from error
    return _Loaded(encoder, tokenizer, min(tokenizer.model_max_length, positions, LONGEST))


def _read(model: str) -> tuple[PreTrainedTokenizerBase, int]:
    """The tokenizer, and the positions that the encoder has. Raises UnsupportedModel: as `SentenceEncoder` does."""
    config = any_config(model)
    if config.is_encoder_decoder or config.model_type not in MODEL_MAPPING_NAMES:
        raise UnsupportedModel(f"{model}: expected an encoder of sentences, found {config.model_type}")
    tokenizer = load_tokenizer(model)
    if tokenizer.pad_token is None:
        raise UnsupportedModel(f"{model}: its tokenizer has no padding token")
    return tokenizer, getattr(config, "max_position_embeddings", None) or LONGEST
