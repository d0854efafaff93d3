"""An adapter of PEFT that stands in front of a request: a prefix of keys and values, or embeddings of virtual tokens.

PEFT saves what its encoders make, whatever they are (an MLP, an LSTM, a projection): one tensor `prompt_embeddings`.

    PREFIX_TUNING, CARTRIDGE   [p, L 2 J D]: keys and values, which it puts into the cache as they are
    PROMPT_TUNING, P_TUNING    [p, d]: embeddings, which it puts in front of a request's

Either way its requests stand at positions p, p + 1, .. Shapes: see the package.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from safetensors import SafetensorError, safe_open
from torch import Tensor

from inducekv_vllm.bundle.adapters import CONFIG, WEIGHTS, read_config
from inducekv_vllm.errors import BundleError

from ..backbone.model import Backbone
from .prefix import Prefix, computed, moved
from .source import Source
from .torch_file import float_tensor

OF_CACHE: Final = ("PREFIX_TUNING", "CARTRIDGE")
OF_EMBEDDINGS: Final = ("PROMPT_TUNING", "P_TUNING")
TENSOR: Final = "prompt_embeddings"
MAX_TOKENS: Final = 2**20


@dataclass(frozen=True)
class Adapter:
    """An adapter as its folder has it."""

    folder: Path
    kind: str  # its peft_type
    tokens: int  # p
    config: dict[str, Any]

    @property
    def base(self) -> str:
        """The model that it was trained with, as PEFT calls it; empty if it does not say."""
        return str(self.config.get("base_model_name_or_path") or "")


def peft_source(folder: Path) -> Source:
    """The folder of an adapter; its weights are read later.

    Raises:
        BundleError: a file is missing or unreadable, or it is another kind of adapter, whose memory would not be exact.
    """
    config, digest = read_config(folder)
    path = folder / CONFIG
    _check_kind(config, path)
    tokens = config.get("num_virtual_tokens")
    if not isinstance(tokens, int) or isinstance(tokens, bool) or not 1 <= tokens <= MAX_TOKENS:
        raise BundleError(f"{path}: num_virtual_tokens must be a whole number from 1 to {MAX_TOKENS}, found {tokens!r}")
    adapter = Adapter(folder, config["peft_type"], tokens, config)
    settings = {"source": adapter.kind, "base": Path(adapter.base).name}
    return Source(digest, settings, lambda backbone: _prefix(backbone, adapter), adapter.base)


def _prefix(backbone: Backbone, adapter: Adapter) -> Prefix:
    """Of its p virtual tokens.

    Raises:
        BundleError: it was trained for a model of another geometry, or its weights are damaged.
    """
    L, J, D, p = backbone.num_layers, backbone.num_kv_heads, backbone.head_dim, adapter.tokens
    if adapter.kind in OF_EMBEDDINGS:
        _check_sizes(adapter, {"token_dim": backbone.hidden_size})
        return computed(backbone, _weights(adapter, (p, backbone.hidden_size)))
    _check_sizes(adapter, {"num_layers": L, "num_attention_heads": J, "token_dim": J * D})
    pairs = _weights(adapter, (p, L * 2 * J * D)).view(p, L, 2, J, D).permute(2, 1, 3, 0, 4)  # [2, L, J, p, D]
    return moved(backbone, Prefix(pairs[0], pairs[1]))


def _check_kind(config: dict[str, Any], path: Path) -> None:
    kind, task = config.get("peft_type"), config.get("task_type")
    if kind not in OF_CACHE + OF_EMBEDDINGS:
        advice = "; load it with vLLM's --lora-modules" if kind == "LORA" else ""
        raise BundleError(f"{path}: expected {', '.join(OF_CACHE + OF_EMBEDDINGS)}, found {kind!r}{advice}")
    if task != "CAUSAL_LM" or config.get("num_transformer_submodules") not in (None, 1):
        raise BundleError(
            f"{path}: expected an adapter of a decoder alone, task_type 'CAUSAL_LM' with num_transformer_submodules 1, "
            f"found {task!r} with {config.get('num_transformer_submodules')!r}"
        )
    if config.get("modules_to_save"):
        raise BundleError(
            f"{path}: expected an untouched base model, found trained modules: {config['modules_to_save']}"
        )


def _check_sizes(adapter: Adapter, expected: dict[str, int]) -> None:
    """PEFT writes the sizes of the base model into the configuration."""
    found = {name: adapter.config.get(name) for name in expected}
    if found != expected:
        raise BundleError(
            f"{adapter.folder}: was trained for another base model ({adapter.base or 'it does not say which'}): "
            f"expected {_listed(expected)}, found {_listed(found)}"
        )


def _listed(sizes: dict[str, Any]) -> str:
    return ", ".join(f"{name} {size}" for name, size in sizes.items())


def _weights(adapter: Adapter, shape: tuple[int, ...]) -> Tensor:
    path = adapter.folder / WEIGHTS
    name = f"{path}: {TENSOR}"
    try:
        with safe_open(str(path), framework="pt") as file:
            _check_names(list(file.keys()), path)
            if (found := tuple(file.get_slice(TENSOR).get_shape())) != shape:
                raise BundleError(f"{name}: expected the shape {list(shape)}, found {list(found)}")
            return float_tensor(file.get_tensor(TENSOR), shape, name)
    except (OSError, SafetensorError) as error:
        raise BundleError(f"{path}: not a safetensors file: {error}") from error


def _check_names(names: list[str], path: Path) -> None:
    """Anything else would have changed the base model, or would be lost."""
    if names != [TENSOR]:
        raise BundleError(
            f"{path}: expected the tensor {TENSOR!r} alone, found {', '.join(sorted(map(str, names))):.200}"
        )
