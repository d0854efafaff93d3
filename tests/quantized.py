"""Checkpoints with quantised weights, as the tools that make them write them, and the floats that they stand for."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from compressed_tensors.compressors.nvfp4.helpers import pack_fp4_to_uint8, unpack_fp4_from_uint8
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from safetensors.torch import load_file, save_file
from torch import Tensor

GROUP, BLOCK = 32, 64
AWQ_PLACES = (0, 2, 4, 6, 1, 3, 5, 7)  # of eight neighbours, in the order of their bits


class Quantized(NamedTuple):
    """A linear layer."""

    parts: dict[str, Tensor]  # what the checkpoint has in place of `weight`
    floats: Tensor  # [N, K] float32


def save_quantized(folder: Path, method: str) -> dict[str, Tensor]:
    """Quantise the linear layers of a folder's model in place. Returns the floats that its weights stand for."""
    quantize, settings = METHODS[method]
    stored, floats = dict[str, Tensor](), dict[str, Tensor]()
    for name, tensor in load_file(folder / "model.safetensors").items():
        if not name.endswith("_proj.weight"):
            stored[name] = floats[name] = tensor
            continue
        parts, floats[name] = quantize(tensor.float())
        stored |= {name.removesuffix("weight") + part: value.contiguous() for part, value in parts.items()}
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"quantization_config": settings}))
    return floats


def in_groups(weight: Tensor, levels: int) -> tuple[Tensor, Tensor]:
    """Whole numbers [N, K] from -levels - 1 to levels, and their scales [N, K / GROUP]."""
    groups = weight.unflatten(1, (-1, GROUP))
    scales = (groups.abs().amax(2) / levels).half().float()
    return (groups / scales[..., None]).round().clamp(-levels - 1, levels).int().flatten(1), scales


def floats_of(numbers: Tensor, scales: Tensor) -> Tensor:
    return numbers * scales.repeat_interleave(GROUP, 1)


def packed(numbers: Tensor, bits: int) -> Tensor:
    """Non-negative numbers [R, n], the first in the lowest bits: [R, n bits / 32] int32."""
    per_word = 32 // bits
    words = torch.zeros(len(numbers), numbers.shape[1] // per_word, dtype=torch.int64)
    for place in range(per_word):
        words += numbers[:, place::per_word].long() << (bits * place)
    return torch.where(words < 2**31, words, words - 2**32).int()


def gptq(weight: Tensor, bits: int = 4) -> Quantized:
    numbers, scales = in_groups(weight, 2 ** (bits - 1) - 1)
    middle = 2 ** (bits - 1)
    zeros = torch.full(scales.shape, middle - 1)  # one less than it is, in the first version of the format
    groups = torch.arange(weight.shape[1]) // GROUP
    if bits == 8:  # as with `desc_act`: inputs of one group lie anywhere
        order = torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(0))
        numbers, groups = numbers[:, order], groups[order]
    parts = {
        "qweight": packed(numbers + middle, bits).T,
        "qzeros": packed(zeros.T, bits),
        "scales": scales.T.half(),
        "g_idx": groups.int(),
    }
    return Quantized(parts, numbers * scales[:, groups])


def awq(weight: Tensor) -> Quantized:
    numbers, scales = in_groups(weight, 7)
    zeros = torch.randint(6, 10, scales.shape, generator=torch.Generator().manual_seed(0))
    numbers = (numbers + zeros.repeat_interleave(GROUP, 1)).clamp(0, 15)  # [N, K]

    def in_order(columns: Tensor) -> Tensor:
        return packed(columns.unflatten(1, (-1, 8))[..., AWQ_PLACES].flatten(1), 4)

    parts = {"qweight": in_order(numbers.T), "qzeros": in_order(zeros.T), "scales": scales.T.half()}
    return Quantized(parts, floats_of(numbers - zeros.repeat_interleave(GROUP, 1), scales))


def pack_quantized(weight: Tensor) -> Quantized:
    numbers, scales = in_groups(weight, 7)
    parts = {"weight_packed": pack_to_int32(numbers.to(torch.int8), 4), "weight_scale": scales.half()}
    return Quantized(parts | {"weight_shape": torch.tensor(weight.shape)}, floats_of(numbers, scales))


def int_quantized(weight: Tensor) -> Quantized:
    scales = (weight.abs().amax(1, keepdim=True) / 127).half().float()
    numbers = (weight / scales).round().clamp(-127, 127).to(torch.int8)
    return Quantized({"weight": numbers, "weight_scale": scales.half()}, numbers * scales)


def fp8_in_blocks(weight: Tensor) -> Quantized:
    """The last block of a row or column may be smaller."""
    rows, columns = (-(-size // BLOCK) for size in weight.shape)
    scales, numbers = torch.zeros(rows, columns), weight.to(torch.float8_e4m3fn)
    floats = torch.zeros_like(weight)
    for row in range(rows):
        for column in range(columns):
            at = slice(row * BLOCK, (row + 1) * BLOCK), slice(column * BLOCK, (column + 1) * BLOCK)
            scales[row, column] = weight[at].abs().max() / 448
            numbers[at] = (weight[at] / scales[row, column]).to(torch.float8_e4m3fn)
            floats[at] = numbers[at].float() * scales[row, column]
    return Quantized({"weight": numbers, "weight_scale_inv": scales}, floats)


def fp8(weight: Tensor) -> Quantized:
    scale = weight.abs().max() / 448
    numbers = (weight / scale).to(torch.float8_e4m3fn)
    return Quantized({"weight": numbers, "weight_scale": scale, "input_scale": scale.clone()}, numbers.float() * scale)


def nvfp4(weight: Tensor) -> Quantized:
    """Four bits with a scale of 8 bits for 16 inputs, and one of 32 bits for all."""
    groups = weight.unflatten(1, (-1, 16))
    overall = weight.abs().max() / (6 * 448)
    scales = (groups.abs().amax(2) / 6 / overall).clamp(min=2**-6).to(torch.float8_e4m3fn)
    each = (scales.float() * overall).repeat_interleave(16, 1)
    packed = pack_fp4_to_uint8(weight / each)
    numbers = unpack_fp4_from_uint8(packed, *weight.shape, dtype=torch.float32)
    return Quantized({"weight": packed, "weight_scale": scales, "weight_scale_2": overall}, numbers * each)


def nvfp4_packed(weight: Tensor) -> Quantized:
    """The same as compressed-tensors names it: its scale of all is the inverse."""
    parts, _ = nvfp4(weight)
    overall = (1 / parts["weight_scale_2"]).reshape(1)
    each = (parts["weight_scale"].float() / overall).repeat_interleave(16, 1)
    numbers = unpack_fp4_from_uint8(parts["weight"], *weight.shape, dtype=torch.float32)
    named = {"weight_packed": parts["weight"], "weight_scale": parts["weight_scale"], "weight_global_scale": overall}
    return Quantized(named, numbers * each)


def _compressed(form: str, weights: dict[str, Any], activations: dict[str, Any] | None = None) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": form,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
    }


_INT = {"type": "int", "symmetric": True, "dynamic": False}
_FP8 = {"quant_method": "fp8", "fmt": "e4m3"}
METHODS: dict[str, tuple[Callable[[Tensor], Quantized], dict[str, Any]]] = {
    "gptq": (gptq, {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": True}),
    "gptq-8bit": (
        lambda weight: gptq(weight, 8),
        {"quant_method": "gptq", "bits": 8, "group_size": GROUP, "desc_act": True, "sym": True},
    ),
    "awq": (awq, {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}),
    "pack-quantized": (
        pack_quantized,
        _compressed("pack-quantized", {**_INT, "num_bits": 4, "group_size": GROUP, "strategy": "group"}),
    ),
    "int-quantized": (
        int_quantized,
        _compressed(
            "int-quantized",
            {**_INT, "num_bits": 8, "strategy": "channel"},
            {"type": "int", "symmetric": True, "dynamic": True, "num_bits": 8, "strategy": "token"},
        ),
    ),
    "nvfp4-pack-quantized": (
        nvfp4_packed,
        _compressed(
            "nvfp4-pack-quantized",
            {"type": "float", "symmetric": True, "dynamic": False, "num_bits": 4, "group_size": 16}
            | {"strategy": "tensor_group"},
        ),
    ),
    "modelopt-nvfp4": (nvfp4, {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16}),
    "modelopt-fp8": (fp8, {"quant_method": "modelopt", "quant_algo": "FP8"}),
    "fp8": (fp8, {**_FP8, "activation_scheme": "static"}),
    "fp8-blocks": (
        fp8_in_blocks,
        {**_FP8, "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]},
    ),
}
