"""Refuses checkpoints with quantised weights: by what they say of themselves, and by the tensors that they hold."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from safetensors import SafetensorError, safe_open
from transformers import PretrainedConfig
from transformers.utils.hub import cached_file

from ..errors import UnsupportedModel

# Files in which some tools describe the quantisation of a checkpoint, in place of its config.json.
QUANTIZATION_FILES: Final = {
    "hf_quant_config.json": "modelopt",
    "quantize_config.json": "gptq",
    "quant_config.json": "awq",
}
# What quantisation adds to the name of a weight, for instance `q_proj.weight_scale`.
QUANTIZED_NAMES: Final = (
    *("qweight", "qzeros", "scales", "weight_packed", "weight_scale", "weight_scale_inv"),
    *("SCB", "absmax", "quant_map", "nested_absmax", "nested_quant_map"),  # bitsandbytes
    *("_data", "W_q"),  # quanto, HQQ
)
PLAIN_DTYPES: Final = ("F64", "F32", "F16", "BF16")  # as safetensors names them


def require_plain_weights(config: PretrainedConfig, model: str | Path, revision: str | None = None) -> None:
    """Check a checkpoint's configuration, and the headers of those of its safetensors files that are on this machine.

    Raises:
        UnsupportedModel: its weights are quantised, or a file of them is damaged.
    """
    folder = Path(str(cached_file(str(model), "config.json", revision=revision, local_files_only=True))).parent
    if method := quantization_method(config, folder, model):
        raise quantized(model, method)
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt") as weights:
                names = list(weights.keys())
                require_plain_names(names, model)
                for name in names:
                    header = weights.get_slice(name)
                    if _is_quantized(name, header.get_dtype(), len(header.get_shape())):
                        raise quantized(model, f"{name} in {file.name} has the dtype {header.get_dtype()}")
        except (OSError, SafetensorError) as error:
            raise UnsupportedModel(f"{model}: cannot read the weights in {file.name}: {error}") from error


def require_plain_names(names: Iterable[str], model: str | Path) -> None:
    """Raises UnsupportedModel: one of the weights' names belongs to quantised weights."""
    for name in sorted(names):
        if name.rpartition(".")[2] in QUANTIZED_NAMES:
            raise quantized(model, f"they have {name}")


def quantization_method(config: PretrainedConfig, folder: Path, model: str | Path) -> str | None:
    """The method by which a checkpoint says that its weights are quantised, such as "awq"; None if it does not."""
    for part in (config, config.get_text_config(decoder=True)):
        for name in ("quantization_config", "compression_config"):
            settings: Any = getattr(part, name, None)
            if settings is not None:
                settings = settings if isinstance(settings, dict) else settings.to_dict()
                method = settings.get("quant_method", "of an unnamed method")
                return str(getattr(method, "value", method))
    found = [method for file, method in QUANTIZATION_FILES.items() if (folder / file).is_file()]
    return found[0] if found else None


def quantized(model: str | Path, method: str) -> UnsupportedModel:
    """The error for a checkpoint whose weights are quantised."""
    return UnsupportedModel(
        f"{model}: its weights are quantised ({method}): memory is made and served with unquantised weights, whose "
        "query keys it is searched with"
    )


def _is_quantized(name: str, dtype: str, dimensions: int) -> bool:
    """Buffers of whole numbers are no weights: the numbers of positions, and masks that are stored as bytes.

    No plain checkpoint has floats below 16 bits. Fused experts are matrices called `gate_up_proj`, without `.weight`,
    and `gate_up_proj_blocks` in MXFP4.
    """
    if dtype in PLAIN_DTYPES:
        return False
    return dtype.startswith("F") or (dimensions > 1 and name.endswith(("weight", "_proj", "_blocks")))
