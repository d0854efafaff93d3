"""Which kind of model a checkpoint holds, and which checkpoints cannot have a memory."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Literal

from transformers import AutoConfig, AutoTokenizer, PretrainedConfig, PreTrainedTokenizerBase
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from ..errors import UnsupportedModel
from ..models import ARCHITECTURES, chat_template, register_configurations
from .footprint import TEXT_CONFIG_KEYS, size
from .quantization import require_known_weights

# "text": prompts are text alone; "multimodal": they may hold pictures.
Kind = Literal["text", "multimodal"]
SIZES: Final = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim")
# What the tokenizers of transformers read: their own format, SentencePiece's, tiktoken's, Mistral's, lists of words.
VOCABULARY_FILES: Final = ("tokenizer.*", "*.model", "*.tiktoken", "tekken.json", "*vocab*")


def require_model_folder(model: str | Path) -> None:
    """Check that a model given as a path exists; Hugging Face would report an invalid id instead.

    Raises:
        UnsupportedModel: `model` is written as a path, but there is no such folder, or it is no model's.
    """
    path = Path(model)
    if path.is_file():
        raise UnsupportedModel(f"{model}: expected a model folder, found a file")
    if _is_path(model) and not path.is_dir():
        raise UnsupportedModel(f"{model}: no such model folder")
    if path.is_dir() and not (path / "config.json").is_file():
        raise UnsupportedModel(f"{model}: expected a model folder, found no config.json in it")


def load_config(model: str | Path, revision: str | None = None) -> tuple[PretrainedConfig, Kind]:
    """The configuration and kind of a model folder or Hugging Face id, if such a checkpoint can have a memory.

    Raises:
        UnsupportedModel: there is none or it is malformed, or the weights are of another kind of model, or
            quantised in a way that nothing can be taught with.
    """
    require_model_folder(model)
    register_configurations()
    try:
        settings, _ = PretrainedConfig.get_config_dict(str(model), revision=revision)
        _check_settings(settings)
        config: PretrainedConfig = AutoConfig.from_pretrained(str(model), revision=revision, trust_remote_code=False)
    except Exception as error:  # the classes of transformers compute with whatever the file says
        raise UnsupportedModel(f"{model}: cannot load the configuration: {summary(error)}") from error
    require_known_weights(config, model, revision)
    return config, kind_of(config, model)


def any_config(model: str) -> PretrainedConfig:
    """The configuration of a model that need not generate text.

    Raises:
        UnsupportedModel: there is none, or it is malformed.
    """
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(model, trust_remote_code=False)
    except Exception as error:  # as in `load_config`
        raise UnsupportedModel(f"{model}: cannot load the configuration: {summary(error)}") from error
    return config


def kind_of(config: PretrainedConfig, model: str | Path) -> Kind:
    """The kind of a checkpoint.

    Raises:
        UnsupportedModel: it is an encoder-decoder, or no model that generates text.
    """
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModel(
            f"{model}: {config.model_type} is an encoder-decoder: memory needs a decoder that reads the whole prompt"
        )
    architecture = next(iter(config.architectures or ()), None)
    if architecture is None:
        raise UnsupportedModel(f"{model}: its config.json names no architecture")
    multimodal = _class_names({**ARCHITECTURES, **MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES}, config.model_type)
    text = _class_names(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, config.model_type)
    if architecture in multimodal:
        return "multimodal"
    if architecture in text:
        return "text"
    expected = ", ".join((*multimodal, *text)) or "another kind of model"
    raise UnsupportedModel(f"{model}: expected a model that generates text ({expected}), found {architecture}")


def load_tokenizer(model: str | Path, revision: str | None = None) -> PreTrainedTokenizerBase:
    """A model's tokenizer.

    Raises:
        UnsupportedModel: it has none, or one that cannot be loaded.
    """
    folder = Path(model)
    # Without these files transformers makes a tokenizer of some classes all the same, of no words.
    if folder.is_dir() and not any(file for pattern in VOCABULARY_FILES for file in folder.glob(pattern)):
        raise UnsupportedModel(
            f"{model}: the model has no tokenizer: expected tokenizer.json or another vocabulary in its folder"
        )
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            str(model), revision=revision, trust_remote_code=False
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UnsupportedModel(f"{model}: cannot load the tokenizer: {summary(error)}") from error
    if tokenizer.chat_template is None:
        settings, _ = PretrainedConfig.get_config_dict(str(model), revision=revision)
        tokenizer.chat_template = chat_template(settings.get("model_type", ""))
    return tokenizer


def summary(error: Exception) -> str:
    """What an error of transformers says first, in one line; its name if it says nothing, or only a key."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines or isinstance(error, KeyError):
        return " ".join([type(error).__name__, *lines])
    # Some lines only announce the next one.
    return " ".join(lines[: next((row for row, line in enumerate(lines, 1) if not line.endswith(":")), None)])


def _check_settings(settings: Mapping[str, Any]) -> None:
    """Check what transformers computes with before it looks at it. Raises UnsupportedModel."""
    parts = [part for key in TEXT_CONFIG_KEYS if isinstance(part := settings.get(key), Mapping)]
    for part in (settings, *parts):
        for name in SIZES:
            if part.get(name) is not None:
                size(part, name)
        for name in ("quantization_config", "compression_config"):
            if not isinstance(part.get(name), Mapping | None):
                raise UnsupportedModel(f"{name} must be a JSON object, found {part[name]!r}")


def _is_path(model: str | Path) -> bool:
    """An id of the hub has one slash at most; what begins as a URL is for vLLM, which loads from some."""
    if isinstance(model, Path):
        return True
    return model.startswith((".", "/", "~")) or (model.count("/") > 1 and "://" not in model)


def _class_names(mapping: Any, model_type: str) -> tuple[str, ...]:
    names = mapping.get(model_type, ())
    return (names,) if isinstance(names, str) else tuple(names)
