"""Which kind of model a checkpoint holds, by its configuration alone, and which kinds cannot have a memory."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final, Literal

from transformers import AutoTokenizer, PretrainedConfig, PreTrainedTokenizerBase
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from .errors import UnsupportedModel

# "text": prompts are text alone; "multimodal": they may hold pictures.
Kind = Literal["text", "multimodal"]
# Files in which some tools describe the quantisation of a checkpoint, in place of its config.json.
QUANTIZATION_FILES: Final = {
    "hf_quant_config.json": "modelopt",
    "quantize_config.json": "gptq",
    "quant_config.json": "awq",
}
# What quantisation adds to the name of a weight, for instance `q_proj.weight_scale`.
QUANTIZED_NAMES: Final = ("qweight", "qzeros", "scales", "weight_packed", "weight_scale", "weight_scale_inv")


def require_model_folder(model: str | Path) -> None:
    """Check that a model given as a path exists; Hugging Face would report an invalid id instead.

    Raises:
        UnsupportedModel: `model` is written as a path, but there is no such folder, or it is no model's.
    """
    if (isinstance(model, Path) or model.startswith((".", "/", "~"))) and not Path(model).is_dir():
        raise UnsupportedModel(f"{model}: no such model folder")
    if Path(model).is_dir() and not Path(model, "config.json").is_file():
        raise UnsupportedModel(f"{model}: expected a model folder, found no config.json in it")


def kind_of(config: PretrainedConfig, model: str | Path) -> Kind:
    """The kind of a checkpoint.

    Raises:
        UnsupportedModel: it is quantised, an encoder-decoder, or no model that generates text.
    """
    if method := quantization_method(config, model):
        raise quantized(model, method)
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModel(
            f"{model}: {config.model_type} is an encoder-decoder: memory needs a decoder that reads the whole prompt"
        )
    architecture = next(iter(config.architectures or ()), None)
    if architecture is None:
        raise UnsupportedModel(f"{model}: its config.json names no architecture")
    multimodal = _class_names(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES, config.model_type)
    text = _class_names(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, config.model_type)
    if architecture in multimodal:
        return "multimodal"
    if architecture in text:
        return "text"
    expected = ", ".join((*multimodal, *text)) or "another kind of model"
    raise UnsupportedModel(f"{model}: expected a model that generates text ({expected}), found {architecture}")


def quantization_method(config: PretrainedConfig, model: str | Path) -> str | None:
    """The name of the method by which a checkpoint's weights are quantised, such as "awq"; None for plain weights."""
    for part in (config, config.get_text_config(decoder=True)):
        for name in ("quantization_config", "compression_config"):
            settings: Any = getattr(part, name, None)
            if settings is not None:
                settings = settings if isinstance(settings, dict) else settings.to_dict()
                method = settings.get("quant_method", "of an unnamed method")
                return str(getattr(method, "value", method))
    found = [method for file, method in QUANTIZATION_FILES.items() if Path(model, file).is_file()]
    return found[0] if found else None


def require_plain_weights(names: Iterable[str], model: str | Path) -> None:
    """Check the names of the weights that a checkpoint has and its architecture does not.

    Raises:
        UnsupportedModel: one of them belongs to quantised weights, which would be read without it.
    """
    for name in sorted(names):
        if name.rpartition(".")[2] in QUANTIZED_NAMES:
            raise quantized(model, f"they have {name}")


def quantized(model: str | Path, method: str) -> UnsupportedModel:
    """The error for a checkpoint whose weights are quantised."""
    return UnsupportedModel(
        f"{model}: its weights are quantised ({method}): memory is made and served with unquantised weights, whose "
        "query keys it is searched with"
    )


def load_tokenizer(model: str | Path, revision: str | None = None) -> PreTrainedTokenizerBase:
    """A model's tokenizer.

    Raises:
        UnsupportedModel: it has none, or one that cannot be loaded.
    """
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            str(model), revision=revision, trust_remote_code=False
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        folder = Path(model)
        if folder.is_dir() and not any(folder.glob("tokenizer*")):
            raise UnsupportedModel(
                f"{model}: the model has no tokenizer: expected tokenizer.json or another tokenizer file in its folder"
            ) from error
        raise UnsupportedModel(f"{model}: cannot load the tokenizer: {first_line(error)}") from error
    return tokenizer


def first_line(error: Exception) -> str:
    """What an error of transformers says first; its name if it says nothing."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _class_names(mapping: Any, model_type: str) -> tuple[str, ...]:
    names = mapping.get(model_type, ())
    return (names,) if isinstance(names, str) else tuple(names)
