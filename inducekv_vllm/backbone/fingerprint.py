"""The fingerprint of a backbone, computed from its configuration and tokenizer without remote code.

The selector stores it in a bundle; the server computes it again and compares. Of the weights only the headers are read:
quantised ones are refused.
"""

from __future__ import annotations

import copy
import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from transformers import AutoModel, PretrainedConfig, PreTrainedTokenizerBase

from ..bundle import BackboneFingerprint
from ..bundle.metadata import first_problem
from ..errors import UnsupportedModel
from .checkpoints import load_config, load_tokenizer, summary


def backbone_fingerprint(model: str | Path, revision: str | None = None) -> BackboneFingerprint:
    """Compute the fingerprint of a model folder or Hugging Face id.

    Raises:
        UnsupportedModel: the configuration or tokenizer cannot be loaded, or the model is of a kind that cannot have a
            memory.
    """
    config, _ = load_config(model, revision)
    return fingerprint_of(config, load_tokenizer(model, revision))


def fingerprint_of(config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase) -> BackboneFingerprint:
    """Compute the fingerprint from a loaded configuration and tokenizer.

    Raises:
        UnsupportedModel: a required setting is missing, or has a value of which no model can be made.
    """
    text, name = config.get_text_config(decoder=True), config.name_or_path or config.model_type
    try:
        heads, hidden_size = text.num_attention_heads, text.hidden_size
        return BackboneFingerprint(
            # The same wrapper around another language model is another backbone.
            architecture=f"{(config.architectures or [])[0]}/{text.model_type}",
            num_layers=text.num_hidden_layers,
            num_kv_heads=getattr(text, "num_key_value_heads", None) or heads,
            head_dim=getattr(text, "head_dim", None) or hidden_size // heads,
            hidden_size=hidden_size,
            rope=_canonical(text.rope_parameters),
            norm=_canonical({"eps": text.rms_norm_eps, "k_norm": _has_k_norm(text)}),
            tokenizer_digest=tokenizer_digest(tokenizer),
        )
    except (AttributeError, IndexError) as error:
        raise UnsupportedModel(f"{name}: the configuration lacks a required setting: {error}") from error
    except ValidationError as error:
        raise UnsupportedModel(f"{name}: the configuration does not fit a memory: {first_problem(error)}") from error
    except Exception as error:  # `_has_k_norm` runs the model's own code on settings that nobody has checked
        raise UnsupportedModel(f"{name}: no model can be made of the configuration: {summary(error)}") from error


def tokenizer_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """Hash the vocabulary, added tokens and chat template (sha256), independent of the tokenizer's file format."""
    added = {
        number: [str(token), token.special, token.normalized, token.lstrip, token.rstrip, token.single_word]
        for number, token in tokenizer.added_tokens_decoder.items()
    }
    content = {
        "vocabulary": sorted(tokenizer.get_vocab().items()),
        "added": sorted(added.items()),
        "chat_template": tokenizer.chat_template,
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _has_k_norm(text: PretrainedConfig) -> bool:
    """Check for key normalisation on a one-layer model built on the meta device."""
    one_layer = copy.deepcopy(text)
    one_layer.num_hidden_layers = 1
    if getattr(one_layer, "layer_types", None):
        one_layer.layer_types = one_layer.layer_types[:1]
    with torch.device("meta"):
        model: torch.nn.Module = AutoModel.from_config(one_layer, trust_remote_code=False)  # type: ignore[no-untyped-call]
    return any(name.endswith(".k_norm") for name, _ in model.named_modules())


def _canonical(value: Any) -> Any:
    """Normalise a JSON value: drop nulls in objects, make ints floats and tuples lists."""
    if isinstance(value, dict):
        return {str(key): _canonical(value[key]) for key in sorted(value) if value[key] is not None}
    if isinstance(value, (list, tuple)):
        return [_canonical(item) for item in value]
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    return value
