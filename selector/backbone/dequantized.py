"""Quantised weights as the floats that they stand for.

What a server computes with them is the same function, up to how it rounds: methods that quantise activations too (FP8,
and compressed-tensors with `input_activations`) round those for each token.

Shapes: K inputs and N outputs of a linear layer, G groups of inputs, p numbers in an int32, b rows or columns of a
block.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import torch
from huggingface_hub import snapshot_download
from safetensors import safe_open
from torch import Tensor

from inducekv_vllm.backbone.weights import stored_tensors
from inducekv_vllm.errors import UnsupportedModel

Parts = Mapping[str, Tensor]  # of a linear layer, by the last part of their names
AWQ_ORDER: Final = (0, 4, 1, 5, 2, 6, 3, 7)  # where the numbers of an int32 belong
E2M1: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of the lower three bits; the fourth is the sign
MODELOPT: Final = ("FP8", "NVFP4", "MIXED_PRECISION")  # which of the two a layer has, its parts say
WEIGHT_FILES: Final = ("*.safetensors", "*.safetensors.index.json")


def dequantized(model: str | Path, settings: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Tensor]:
    """The weights of a checkpoint by name, in `dtype`: those of its linear layers as `weight` [N, K].

    Args:
        settings: the `quantization_config` of its config.json.

    Raises:
        UnsupportedModel: the method has settings that are not known here, or parts of a layer are missing or do not
            fit.
    """
    read = _reader(model, settings)
    folder = model if Path(model).is_dir() else snapshot_download(str(model), allow_patterns=list(WEIGHT_FILES))
    weights: dict[str, Tensor] = {}
    num_quantized = 0
    for layer, parts in _layers(stored_tensors(folder)):
        if not (parts.keys() & {"qweight", "weight_scale", "weight_scale_inv"}):
            weights |= {f"{layer}.{name}" if layer else name: tensor.to(dtype) for name, tensor in parts.items()}
            continue
        num_quantized += 1
        try:
            weights[f"{layer}.weight"] = read(parts).to(dtype)
        except (KeyError, RuntimeError, IndexError) as error:
            raise UnsupportedModel(f"{model}: the quantised weights of {layer} do not fit: {error}") from error
        if "bias" in parts:
            weights[f"{layer}.bias"] = parts["bias"].to(dtype)
    if not num_quantized:
        raise UnsupportedModel(
            f"{model}: its config.json says that its weights are quantised by {settings['quant_method']}, found none"
        )
    return weights


def _layers(stored: Mapping[str, Path]) -> Iterator[tuple[str, Parts]]:
    """The tensors that belong together, by the name of their module."""
    by_layer: dict[str, dict[str, Path]] = {}
    for name, path in stored.items():
        layer, _, part = name.rpartition(".")
        by_layer.setdefault(layer, {})[part] = path
    with ExitStack() as stack:
        files = {path: stack.enter_context(safe_open(path, framework="pt")) for path in set(stored.values())}
        for layer, paths in by_layer.items():
            names = {part: f"{layer}.{part}" if layer else part for part in paths}
            yield layer, {part: files[path].get_tensor(names[part]) for part, path in paths.items()}


def _reader(model: str | Path, settings: Mapping[str, Any]) -> Callable[[Parts], Tensor]:
    """What makes a layer's weight [N, K] from its parts."""
    method, bits = settings["quant_method"], settings.get("bits", 4)
    known = {
        "awq": (bits == 4 and settings.get("version", "gemm") == "gemm", _of_awq),
        "gptq": (
            bits in (4, 8) and settings.get("sym", True) is True and not settings.get("dynamic"),
            lambda parts: _of_gptq(parts, bits),
        ),
        "fp8": (True, lambda parts: _of_fp8(parts, settings.get("weight_block_size"))),
        "compressed-tensors": (is_nvfp4(settings), _of_nvfp4),
        "modelopt": (str(settings.get("quant_algo", "")).upper() in MODELOPT, _of_modelopt),
    }
    is_known, read = known[method]
    if not is_known:
        raise UnsupportedModel(
            f"{model}: its weights are quantised by {method} with settings that are not known: expected AWQ of 4 bits "
            "in the version gemm, symmetric GPTQ of 4 or 8 bits for all layers, or ModelOpt's "
            f"{', '.join(MODELOPT)}; found {dict(settings)}"
        )
    return read


def unpacked(packed: Tensor, bits: int) -> Tensor:
    """The numbers in the int32 of [..., n], the lowest bits first: [..., n p] int32."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    numbers: Tensor = (packed[..., None] >> shifts) & (2**bits - 1)
    return numbers.flatten(-2)


def _of_awq(parts: Parts) -> Tensor:
    """qweight [K, N / 8], qzeros [G, N / 8], scales [G, N] [https://arxiv.org/abs/2306.00978]."""

    def numbers(packed: Tensor) -> Tensor:
        of_each = unpacked(packed, 4).view(len(packed), -1, 8)
        return of_each[..., AWQ_ORDER].flatten(1)

    weight, scales = numbers(parts["qweight"]), parts["scales"].float()  # [K, N], [G, N]
    repeats = weight.shape[0] // scales.shape[0]
    zeros = numbers(parts["qzeros"]).repeat_interleave(repeats, 0)
    floats: Tensor = (weight - zeros) * scales.repeat_interleave(repeats, 0)
    return floats.T.contiguous()


def _of_gptq(parts: Parts, bits: int) -> Tensor:
    """qweight [K / p, N], scales [G, N], g_idx [K] the group of each input [https://arxiv.org/abs/2210.17323].

    Symmetric: the zero is in the middle, whatever `qzeros` says; vLLM does not read them either.
    """
    weight = unpacked(parts["qweight"].T.contiguous(), bits).T  # [K, N]
    scales = parts["scales"].float()
    groups = parts.get("g_idx")
    if groups is None:
        groups = torch.arange(weight.shape[0]) // (weight.shape[0] // scales.shape[0])
    floats: Tensor = (weight - 2 ** (bits - 1)) * scales[groups.long()]
    return floats.T.contiguous()


def _of_fp8(parts: Parts, block: tuple[int, int] | None) -> Tensor:
    """weight [N, K] and its scale: of blocks [N / b, K / b], of rows [N] or [N, 1], or one."""
    weight = parts["weight"].float()
    if block is not None:
        scale = parts["weight_scale_inv"].float()
        scale = scale.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
        return weight * scale[: weight.shape[0], : weight.shape[1]]
    scale = parts["weight_scale"].float()
    return weight * (scale if scale.numel() == 1 else scale.reshape(-1, 1))


def is_nvfp4(settings: Mapping[str, Any]) -> bool:
    """Whether all that is quantised is in NVFP4. compressed-tensors' own decompression of it rounds to 16 bits."""
    groups = [group for group in (settings.get("config_groups") or {}).values() if isinstance(group, Mapping)]
    forms = {group.get("format") or settings.get("format") for group in groups}
    return forms == {"nvfp4-pack-quantized"}


def _of_nvfp4(parts: Parts) -> Tensor:
    """weight_packed [N, K / 2], weight_scale [N, G], and a scale of both that they were multiplied with."""
    return _of_e2m1(parts["weight_packed"], parts["weight_scale"].float() / parts["weight_global_scale"].float())


def _of_modelopt(parts: Parts) -> Tensor:
    """FP8 with a scale for all or for each row, or NVFP4: weight [N, K / 2], weight_scale [N, G], weight_scale_2."""
    if "weight_scale_2" in parts:
        return _of_e2m1(parts["weight"], parts["weight_scale"].float() * parts["weight_scale_2"].float())
    return _of_fp8(parts, None)


def _of_e2m1(packed: Tensor, scales: Tensor) -> Tensor:
    """Numbers of 4 bits, two in each byte of [N, K / 2], the first in the lower bits, times their scales [N, G]."""
    if packed.dtype != torch.uint8:
        raise RuntimeError(f"expected bytes of two numbers each, found {packed.dtype}")
    bits = torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2)  # [N, K]
    numbers = torch.tensor([*E2M1, *(-number for number in E2M1)])[bits.long()]
    return numbers * scales.repeat_interleave(numbers.shape[1] // scales.shape[1], 1)
