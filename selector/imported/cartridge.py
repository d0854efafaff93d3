"""A cartridge as HazyResearch's `TrainableCache.save` writes it: keys and values of every layer, as a cache has them.

Its requests stand behind all of its tokens, the frozen ones included: at positions p, p + 1, .. (its `models/`).

Shapes: see the package.
"""

from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from inducekv_vllm.backbone.checkpoints import summary
from inducekv_vllm.errors import BundleError

from ..backbone.model import Backbone
from .prefix import Prefix, moved
from .source import Source, sha256_of
from .torch_file import float_tensor, read_torch_file

TRAINED: Final = "trainable"
FROZEN: Final = ("frozen", "fixed")  # of tokens in front of the trained ones; "fixed" in files of its first version


def cartridge_source(path: Path) -> Source:
    """Raises BundleError: it cannot be read, or is no cartridge."""
    cartridge = _read(path)
    return Source(sha256_of(path), {"source": "cartridge"}, lambda backbone: _prefix(backbone, cartridge, str(path)))


def _read(path: Path) -> Mapping[str, Any]:
    """The tensors of a file by its four names, unchecked."""
    found = read_torch_file(path, nn.ParameterList)
    if not isinstance(found, Mapping) or f"{TRAINED}_keys" not in found:
        names = ", ".join(map(repr, found))[:200] if isinstance(found, Mapping) else type(found).__name__
        raise BundleError(f"{path}: not a cartridge: expected '{TRAINED}_keys' and '{TRAINED}_values', found {names}")
    return found


def _prefix(backbone: Backbone, cartridge: Mapping[str, Any], source: str) -> Prefix:
    """The prefix of its p tokens.

    Raises:
        BundleError: a layer is missing, it is of a model of another geometry, or a number is not finite.
    """
    keys, values = (_all_tokens(backbone, cartridge, part, source) for part in ("keys", "values"))
    if keys.shape != values.shape:
        raise BundleError(
            f"{source}: expected as many keys as values, found {keys.shape[2]} and {values.shape[2]} tokens"
        )
    return moved(backbone, Prefix(keys, values))


def _all_tokens(backbone: Backbone, cartridge: Mapping[str, Any], part: str, source: str) -> Tensor:
    """Keys or values [L, J, p, D], the frozen tokens first."""
    frozen = next((name for kind in FROZEN if (name := f"{kind}_{part}") in cartridge), None)
    if frozen is None:
        raise BundleError(f"{source}: the frozen tokens are missing: expected '{FROZEN[0]}_{part}'")
    parts = [_of_layers(backbone, cartridge.get(f"{TRAINED}_{part}"), f"{source}: {TRAINED}_{part}")]
    if _tensors(cartridge[frozen], f"{source}: {frozen}", 1):  # none of them is frozen: an empty list
        parts.insert(0, _of_layers(backbone, cartridge[frozen], f"{source}: {frozen}"))
    return torch.cat(parts, dim=2)


def _of_layers(backbone: Backbone, found: Any, name: str) -> Tensor:
    """One tensor [1, J, tokens, D] a layer, as [L, J, tokens, D]."""
    L, J, D = backbone.num_layers, backbone.num_kv_heads, backbone.head_dim
    tensors = _tensors(found, name, L + 1)
    if len(tensors) != L:
        count = len(tensors) if len(tensors) < L else "more"
        raise BundleError(f"{name}: expected one tensor for each of the model's {L} layers, found {count}")
    shape = tuple(getattr(tensors[0], "shape", ()))
    tokens = shape[2] if len(shape) == 4 else 1
    return torch.cat([float_tensor(each, (1, J, tokens, D), f"{name}[{layer}]") for layer, each in enumerate(tensors)])


def _tensors(found: Any, name: str, most: int) -> list[Any]:
    """The first of them."""
    if not isinstance(found, list | tuple | nn.ParameterList):
        raise BundleError(f"{name}: expected a list of tensors, found {type(found).__name__}")
    try:
        return list(islice(found, most))
    except (TypeError, ValueError, AttributeError) as error:  # a list of parameters may say anything of itself
        raise BundleError(f"{name}: a damaged list of tensors: {summary(error)}") from error
