"""The fingerprint of a backbone, computed from the files of a checkpoint: no model is made, no remote code is run.

The selector stores it in a bundle; the server computes it again and compares. Of the weights, headers and samples are
read.
"""

import hashlib
import json
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from ..bundle import BackboneFingerprint
from ..bundle.metadata import first_problem
from ..errors import UnsupportedModel
from .checkpoints import load_config, load_tokenizer, summary
from .memory_layers import memory_heads, memory_layers
from .weights import weights_digest

NORM_EPS: Final = ("rms_norm_eps", "norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon")


def backbone_fingerprint(
    model: str | Path, revision: str | None = None, cache: str | None = None
) -> BackboneFingerprint:
    """Compute the fingerprint of a model folder, or of a Hugging Face id whose weights were fetched.

    Args:
        cache: where they were fetched to (default: the hub's own cache).

    Raises:
        UnsupportedModel: the configuration or tokenizer cannot be loaded, the model is of a kind that cannot have a
            memory, or its weights are no safetensors files.
    """
    config, _ = load_config(model, revision)
    tokenizer = load_tokenizer(model, revision)
    return fingerprint_of(config, tokenizer, weights_digest(model, revision, cache))


def fingerprint_of(config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase, weights: str) -> BackboneFingerprint:
    """Compute the fingerprint from a loaded configuration, a tokenizer and `weights_digest`.

    Raises:
        UnsupportedModel: a required setting is missing, or has a value of another kind.
    """
    text, name = config.get_text_config(decoder=True), config.name_or_path or config.model_type
    try:
        layers, heads = memory_layers(text), memory_heads(text)
        return BackboneFingerprint(
            # The same wrapper around another language model is another backbone.
            architecture=f"{(config.architectures or [])[0]}/{text.model_type}",
            num_layers=len(layers),
            num_kv_heads=heads.num_kv_heads,
            head_dim=heads.head_dim,
            value_dim=None if heads.value_dim == heads.head_dim else heads.value_dim,
            hidden_size=text.hidden_size,
            rope=_canonical(getattr(text, "rope_parameters", None) or {}),
            norm=_canonical({"eps": _norm_eps(text)}),
            tokenizer_digest=tokenizer_digest(tokenizer),
            weights_digest=weights,
            attention_layers=layers if len(layers) < text.num_hidden_layers else None,
        )
    except UnsupportedModel as error:
        raise UnsupportedModel(f"{name}: {error}") from error
    except (AttributeError, IndexError) as error:
        raise UnsupportedModel(f"{name}: the configuration lacks a required setting: {error}") from error
    except ValidationError as error:
        raise UnsupportedModel(f"{name}: the configuration does not fit a memory: {first_problem(error)}") from error
    except (TypeError, ValueError, ZeroDivisionError) as error:
        raise UnsupportedModel(f"{name}: the configuration does not fit a memory: {summary(error)}") from error


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


def _norm_eps(text: Any) -> Any:
    """Under the first name that a language model's configuration has; None if its norms have none to set."""
    found = (getattr(text, name, None) for name in NORM_EPS)
    return next((eps for eps in found if eps is not None), None)


def _canonical(value: Any) -> Any:
    """Normalise a JSON value: drop nulls in objects, make ints floats and tuples lists."""
    if isinstance(value, dict):
        return {str(key): _canonical(value[key]) for key in sorted(value) if value[key] is not None}
    if isinstance(value, (list, tuple)):
        return [_canonical(item) for item in value]
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    return value
