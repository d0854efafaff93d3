"""The fingerprint of a backbone, from its configuration and tokenizer alone: no weights read, no remote code run.

The selector computes it when it makes a bundle, the server when it loads one; both must come to the same value.
"""

from __future__ import annotations

import copy
import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModel, AutoTokenizer, PretrainedConfig, PreTrainedTokenizerBase

from .bundle import BackboneFingerprint
from .errors import UnsupportedModel


def backbone_fingerprint(model: str | Path, revision: str | None = None) -> BackboneFingerprint:
    """Fingerprint a model folder or Hugging Face id.

    Raises:
        UnsupportedModel: the configuration or the tokenizer cannot be loaded, or is not that of a decoder model.
    """
    require_model_folder(model)
    try:
        config = AutoConfig.from_pretrained(str(model), revision=revision, trust_remote_code=False)
        tokenizer = AutoTokenizer.from_pretrained(str(model), revision=revision, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UnsupportedModel(f"{model}: cannot load the configuration and tokenizer: {reason}") from error
    return fingerprint_of(config, tokenizer)


def require_model_folder(model: str | Path) -> None:
    """Say that a folder is missing, where the Hugging Face library would complain about the form of an id.

    Raises:
        UnsupportedModel: `model` is written as a path, and there is no such folder.
    """
    if (isinstance(model, Path) or model.startswith((".", "/", "~"))) and not Path(model).is_dir():
        raise UnsupportedModel(f"{model}: no such model folder")


def fingerprint_of(config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase) -> BackboneFingerprint:
    """The fingerprint of a configuration and tokenizer already loaded.

    Raises:
        UnsupportedModel: a required setting is missing.
    """
    text = config.get_text_config(decoder=True)
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
    except (AttributeError, IndexError, TypeError) as error:
        raise UnsupportedModel(f"{config.model_type}: the configuration lacks a required setting: {error}") from error


def tokenizer_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """sha256 over what a tokenizer means, whatever files it came from: vocabulary, added tokens, chat template."""
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
    """Whether the attention normalises its keys: read off one layer, built without storage for its weights."""
    one_layer = copy.deepcopy(text)
    one_layer.num_hidden_layers = 1
    if getattr(one_layer, "layer_types", None):
        one_layer.layer_types = one_layer.layer_types[:1]
    with torch.device("meta"):
        model: torch.nn.Module = AutoModel.from_config(one_layer, trust_remote_code=False)  # type: ignore[no-untyped-call]
    return any(name.endswith(".k_norm") for name, _ in model.named_modules())


def _canonical(value: Any) -> Any:
    """The same JSON value for the same meaning: no nulls in objects, whole floats and ints alike, lists for tuples."""
    if isinstance(value, dict):
        return {str(key): _canonical(value[key]) for key in sorted(value) if value[key] is not None}
    if isinstance(value, (list, tuple)):
        return [_canonical(item) for item in value]
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    return value
