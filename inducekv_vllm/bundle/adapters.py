"""LoRA adapters on disk, as PEFT writes them: what a bundle records of one, and whether it is still the same."""

import hashlib
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

from pydantic_core import from_json
from safetensors import SafetensorError, safe_open

from ..errors import BundleError

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
MAX_CONFIG: Final = 2**20  # bytes
_MATRIX: Final = re.compile(r"(?:base_model\.model\.)?(?P<module>.+)\.lora_(?:embedding_)?(?P<side>[AB])(?:\.weight)?")
_OF_BASE: Final = (".embed_tokens.base_layer.weight", ".lm_head.base_layer.weight")  # copies of the model's own


class Matrix(NamedTuple):
    """One of the two of a module: A [rank, in] or B [out, rank]."""

    module: str  # as the model that it was trained with has it
    side: str  # "A" or "B"
    shape: tuple[int, ...]


@dataclass(frozen=True)
class AdapterFiles:
    """What is known of an adapter."""

    digest: str  # sha256 over configuration and weights
    rank: int  # the largest of its modules
    tensors: Mapping[str, Matrix | None]  # by name; None for what belongs to no LoRA


def read_config(folder: Path) -> tuple[dict[str, Any], str]:
    """The configuration of an adapter of PEFT, and the sha256 over it and the weights.

    Raises:
        BundleError: a file is missing or unreadable, or the configuration is no JSON object.
    """
    sha, path = hashlib.sha256(), folder / CONFIG
    try:
        for name in (CONFIG, WEIGHTS):
            with (folder / name).open("rb") as file:
                sha.update(hashlib.file_digest(file, "sha256").digest())
        if (size := path.stat().st_size) > MAX_CONFIG:
            raise BundleError(f"{path}: {size} bytes, more than {MAX_CONFIG}: no configuration of an adapter")
        config: Any = from_json(path.read_bytes())
    except OSError as error:
        raise BundleError(f"{folder}: cannot read the adapter: {error.strerror}: {error.filename}") from error
    except ValueError as error:
        raise BundleError(f"{path}: not JSON: {error}") from error
    if not isinstance(config, dict):
        raise BundleError(f"{path}: expected a JSON object, found {type(config).__name__}")
    return config, sha.hexdigest()


def read_adapter(folder: Path) -> AdapterFiles:
    """Read the configuration of a LoRA adapter and the shapes of its weights, and hash its files.

    Raises:
        BundleError: as of `read_config`; or it is no LoRA adapter, or one that changes nothing.
    """
    config, digest = read_config(folder)
    if (kind := config.get("peft_type")) != "LORA":
        raise BundleError(f"{folder / CONFIG}: expected the peft_type 'LORA', found {kind!r}")
    ranks, alphas = _each(config, "r", "rank_pattern", folder), _each(config, "lora_alpha", "alpha_pattern", folder)
    if not all(isinstance(rank, int) and rank >= 1 for rank in ranks):
        raise BundleError(f"{folder / CONFIG}: expected positive ranks, found {ranks}")
    is_scaled = any(alpha != 0 for alpha in alphas)
    return AdapterFiles(digest, max(ranks), _read_weights(folder / WEIGHTS, is_scaled=is_scaled))


def _each(config: Mapping[str, Any], usual: str, pattern: str, folder: Path) -> list[Any]:
    """The usual value of a setting, and those of modules that have their own."""
    own = config.get(pattern) or {}
    if not isinstance(own, Mapping):
        raise BundleError(f"{folder / CONFIG}: {pattern} must be an object, found {own!r:.100}")
    return [config.get(usual), *own.values()]


def tensor_names(folder: Path) -> list[str]:
    """The names of an adapter's weights. Raises BundleError: they cannot be read."""
    with _opened(folder / WEIGHTS) as file:
        return list(file.keys())


def _read_weights(path: Path, *, is_scaled: bool) -> dict[str, Matrix | None]:
    """`is_scaled`: the products of the matrices are multiplied by something else than zero."""
    tensors: dict[str, Matrix | None] = {}
    moved: dict[str, set[str]] = {}  # the sides that are not zero, by module
    with _opened(path) as file:
        for name in file.keys():  # noqa: SIM118
            if name.endswith(_OF_BASE):
                continue
            found = _MATRIX.fullmatch(name)
            tensors[name] = None
            if found is not None:
                tensors[name] = Matrix(found["module"], found["side"], tuple(file.get_slice(name).get_shape()))
                if file.get_tensor(name).any():
                    moved.setdefault(found["module"], set()).add(found["side"])
    if not is_scaled or not any(len(sides) == 2 for sides in moved.values()):
        raise BundleError(f"{path}: the LoRA adapter changes nothing: its products are zero")
    return tensors


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with safe_open(str(path), framework="pt") as file:
            yield file
    except (OSError, SafetensorError) as error:
        raise BundleError(f"{path}: cannot read the LoRA adapter: {error}") from error
