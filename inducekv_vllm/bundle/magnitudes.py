"""How large the numbers of a bundle may be where it is served.

What memory adds to the attention output is multiplied by a projection and added up over the layers, in the dtype of the
served model. Payloads and maps may reach the square root of its largest number, value gates the fourth root: in
float32 and bfloat16 their product leaves room for what follows. Float16 has little room; there it may still overflow.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import BundleError
from ..pace import rest
from .tensors import Bundle


@dataclass(frozen=True)
class MagnitudeLimits:
    """The largest magnitudes that a served dtype takes."""

    value_gates: float
    layer_bias: float
    payload_values: float
    map_gain: float  # of one entry's map: the most that it makes of outputs between -1 and 1


def magnitude_limits(dtype: torch.dtype) -> MagnitudeLimits:
    """255.9 and 16 for float16, 1.8e19 and 4.3e9 for bfloat16 and float32."""
    root = torch.finfo(dtype).max ** 0.5
    return MagnitudeLimits(value_gates=root**0.5, layer_bias=root, payload_values=root, map_gain=root)


def check_magnitudes(bundle: Bundle, dtype: torch.dtype, name: str) -> None:
    """Check that a model of this dtype can carry a bundle's numbers.

    Raises:
        BundleError: names the tensor, the layer, what was found and the limit.
    """
    limits = magnitude_limits(dtype)
    for tensor_name, limit, found in (
        ("value_gates", limits.value_gates, _of_layers(bundle.value_gates)),
        ("layer_bias", limits.layer_bias, _of_layers(bundle.layer_bias)),
        ("payload_values", limits.payload_values, _of_payloads(bundle, limits.payload_values)),
        ("the gain of a map", limits.map_gain, _of_maps(bundle, limits.map_gain)),
    ):
        for layer, largest in zip(
            bundle.metadata.memory_layers, found, strict=False
        ):  # none found: none can be too large
            if largest > limit:
                raise BundleError(
                    f"{name}: {tensor_name} reaches {largest:.4g} in layer {layer}, and a model that is served in "
                    f"{dtype} takes at most {limit:.4g}"
                )


def _of_layers(numbers: Tensor) -> list[float]:
    largest: list[float] = numbers.abs().tolist()
    return largest


def _of_payloads(bundle: Bundle, limit: float) -> Iterator[float]:
    values = bundle.payload_values  # [L, B, J, m, D]
    if not values.numel() or torch.finfo(values.dtype).max <= limit:
        return
    for layer in values:
        yield max(abs(float(extreme)) for extreme in torch.aminmax(layer))
        rest()


def _of_maps(bundle: Bundle, limit: float) -> Iterator[float]:
    """An upper bound of each layer's gains: what the maps would do if no two of their numbers had opposite signs."""
    if bundle.map_in is None or bundle.map_out is None or not bundle.map_in.numel():
        return
    *_, r, width = bundle.map_in.shape
    if r * width * torch.finfo(bundle.map_in.dtype).max ** 2 <= limit:
        return
    for map_in, map_out in zip(bundle.map_in, bundle.map_out, strict=True):  # [B, J, r, G D], [B, J, G D, r]
        inner, outer = map_in.float().abs(), map_out.float().abs()
        yield float((outer @ inner.sum(-1, keepdim=True)).amax())
        rest()
