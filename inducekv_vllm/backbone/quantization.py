"""Which checkpoints have quantised weights: by what they say of themselves, and by the tensors that they hold.

Weights that are quantised are as fixed as others: memory belongs to the function that they are, and the digest of a
checkpoint's weights tells it from the one it was made from. The selector computes with the floats that they stand for.
"""

from collections.abc import Iterable, Mapping
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
# By `quant_method` in config.json: the selector can write their weights out as the floats that they stand for.
TAUGHT: Final = ("awq", "compressed-tensors", "fp8", "gptq", "modelopt", "mxfp4")


def require_known_weights(config: PretrainedConfig, model: str | Path, revision: str | None = None) -> None:
    """Check a checkpoint's configuration, and the headers of those of its safetensors files that are on this machine.

    Raises:
        UnsupportedModel: its weights are quantised by another method than `TAUGHT`, or a file of them is damaged.
    """
    if taught_method(config) is not None:
        return
    folder = Path(str(cached_file(str(model), "config.json", revision=revision, local_files_only=True))).parent
    if method := quantization_method(config, folder):
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


def taught_method(config: PretrainedConfig) -> str | None:
    """One of `TAUGHT`, if a checkpoint says that its weights are quantised by it."""
    method = _method_in(getattr(config, "quantization_config", None))
    return method if method in TAUGHT else None


def require_plain_names(names: Iterable[str], model: str | Path) -> None:
    """Raises UnsupportedModel: one of the weights' names belongs to quantised weights."""
    for name in sorted(names):
        if name.rpartition(".")[2] in QUANTIZED_NAMES:
            raise quantized(model, f"they have {name}")


def rounds_activations(settings: Mapping[str, Any]) -> bool:
    """Whether a server may round activations, too: what it computes is then not quite the floats of the weights.

    Args:
        settings: the `quantization_config` of a config.json.
    """
    groups = settings.get("config_groups") or {}
    return settings.get("quant_method") in ("fp8", "modelopt") or any(
        group.get("input_activations") for group in groups.values() if isinstance(group, Mapping)
    )


def quantization_method(config: PretrainedConfig, folder: Path) -> str | None:
    """The method by which a checkpoint says that its weights are quantised, such as "awq"; None if it does not."""
    for part in (config, config.get_text_config(decoder=True)):
        for name in ("quantization_config", "compression_config"):
            if (method := _method_in(getattr(part, name, None))) is not None:
                return method
    found = [method for file, method in QUANTIZATION_FILES.items() if (folder / file).is_file()]
    return found[0] if found else None


def _method_in(settings: Any) -> str | None:
    if settings is None:
        return None
    settings = settings if isinstance(settings, dict) else settings.to_dict()
    method = settings.get("quant_method", "of an unnamed method")
    return str(getattr(method, "value", method))


def quantized(model: str | Path, method: str) -> UnsupportedModel:
    """The error for a checkpoint whose weights are quantised in a way that nothing can be taught with."""
    return UnsupportedModel(
        f"{model}: its weights are quantised ({method}): expected plain weights, or weights that its config.json says "
        f"are quantised by {', '.join(TAUGHT[:-1])} or {TAUGHT[-1]}"
    )


def _is_quantized(name: str, dtype: str, dimensions: int) -> bool:
    """Buffers of whole numbers are no weights: the numbers of positions, and masks that are stored as bytes.

    No plain checkpoint has floats below 16 bits. Fused experts are matrices called `gate_up_proj`, without `.weight`,
    and `gate_up_proj_blocks` in MXFP4.
    """
    if dtype in PLAIN_DTYPES:
        return False
    return dtype.startswith("F") or (dimensions > 1 and name.endswith(("weight", "_proj", "_blocks")))
