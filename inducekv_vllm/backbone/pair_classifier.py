"""A sequence classifier as a judge of facts, in place of the model that serves (`judged.py`).

It may have one output, the log-odds that two questions are one, or two, of which the second says so.

Shapes: n pairs, c outputs.
"""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from transformers import AutoModelForSequenceClassification, PretrainedConfig, PreTrainedTokenizerBase
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES

from ..errors import UnsupportedModel
from ..judge import Pair, log_odds, one_line
from .checkpoints import any_config, load_tokenizer, require_model_folder, summary

AT_ONCE: Final = 8
NOT_READ: Final = -100.0  # below every threshold: of a pair that it cannot read


class _Loaded(NamedTuple):
    classifier: Any
    tokenizer: PreTrainedTokenizerBase
    longest: int  # tokens of a pair


class PairClassifier:
    """See the module docstring. One thread at a time may use it; its weights are loaded the first time."""

    def __init__(self, model: str) -> None:
        """
        Args:
            model: a folder, or an id of the hub, which is read when it is loaded.

        Raises:
            UnsupportedModel: there is no such folder, or it holds no classifier with one output or two, and its
                tokenizer.
        """
        require_model_folder(model)
        self._model = model
        if Path(model).is_dir():
            _read(model)

    def said(self, pairs: Sequence[Pair]) -> list[float]:
        """Log-odds [n] that the second of a pair asks what the first asks.

        Raises:
            UnsupportedModel: it cannot be loaded.
        """
        return [each for at in range(0, len(pairs), AT_ONCE) for each in self._said(pairs[at : at + AT_ONCE])]

    def _said(self, pairs: Sequence[Pair]) -> list[float]:
        classifier, tokenizer, longest = self._loaded
        rows = [tokenizer(*map(one_line, pair)) for pair in pairs]
        read = [at for at, row in enumerate(rows) if len(row["input_ids"]) <= longest and self._knows(pairs[at])]
        odds = [NOT_READ] * len(pairs)
        if read:
            batch = tokenizer.pad([rows[at] for at in read], return_tensors="pt").to(classifier.device)
            with torch.inference_mode():
                logits = classifier(**batch).logits.float()  # [n, c]
            for at, outputs in zip(read, logits.tolist(), strict=True):
                odds[at] = log_odds(outputs[-1], outputs[0] if len(outputs) == 2 else 0.0)
        return odds

    def _knows(self, pair: Pair) -> bool:
        """Whether it has no token that stands for anything else: a mark that parts questions, an unknown word."""
        tokenizer = self._loaded.tokenizer
        special = set(tokenizer.all_special_ids)
        ids = tokenizer(list(map(one_line, pair)), add_special_tokens=False)["input_ids"]
        return all(map(special.isdisjoint, ids))

    @cached_property
    def _loaded(self) -> _Loaded:
        config, tokenizer = _read(self._model)
        try:
            classifier, found = AutoModelForSequenceClassification.from_pretrained(
                self._model, dtype=torch.float32, trust_remote_code=False, output_loading_info=True
            )
            if missing := sorted(found["missing_keys"]):
                raise ValueError(f"its weights lack {missing[0]}")
            classifier.eval().to("cuda" if torch.cuda.is_available() else "cpu")
        except Exception as error:
            raise UnsupportedModel(f"{self._model}: cannot load the classifier: {summary(error)}") from error
        positions = getattr(config, "max_position_embeddings", None) or tokenizer.model_max_length
        return _Loaded(classifier, tokenizer, min(tokenizer.model_max_length, positions))


def _read(model: str) -> tuple[PretrainedConfig, PreTrainedTokenizerBase]:
    """Raises UnsupportedModel: as `PairClassifier` does."""
    config = any_config(model)
    expected = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES.get(config.model_type, "a model of another type")
    architecture = next(iter(config.architectures or ()), "no architecture")
    if architecture != expected:
        raise UnsupportedModel(f"{model}: expected a sequence classifier ({expected}), found {architecture}")
    if config.num_labels not in (1, 2):
        raise UnsupportedModel(f"{model}: expected a classifier with one output or two, found {config.num_labels}")
    tokenizer = load_tokenizer(model)
    if tokenizer.pad_token is None:
        raise UnsupportedModel(f"{model}: its tokenizer has no padding token")
    return config, tokenizer
