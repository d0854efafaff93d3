"""The names of bundles: as vLLM sees them, and which ones may be served.

The state has the names (`state/`). vLLM's table of adapters finds them there, so every OpenAI route accepts them. A
request may ask for one version: the model "NAME@DIGEST" is the bundle NAME, while it stands for that content.
"""

import re
from collections.abc import Mapping
from typing import Any, Final

from vllm.config import VllmConfig
from vllm.entrypoints.openai.models.serving import OpenAIServingModels
from vllm.exceptions import RetryableRequestError
from vllm.lora.request import LoRARequest

from inducekv_vllm.errors import CapacityError, ConfigError, UnsupportedModel
from inducekv_vllm.frontend.memory_engine import MemoryRequest
from inducekv_vllm.frontend.served_bundle import ServedBundle, require_shareable
from inducekv_vllm.teaching import ROUTE
from inducekv_vllm.vllm_seams.config import InduceKVConfig
from inducekv_vllm.vllm_seams.known_bugs import ADAPTERS, may_mix_adapters
from inducekv_vllm.vllm_seams.moved import MM_PARSER_MAP

from .adapters import adapter_number
from .schemas import NAME_PATTERN
from .state import ServerState, StateError, VersionRecord
from .versions import PIN, unpinned

MAX_NAMES: Final = 100_000
_NAME: Final = re.compile(NAME_PATTERN)
# vLLM applies an adapter named after a kind of message part ("image", "text") to every request with such a part.
PART_KINDS: Final = frozenset(kind.split("_")[0] for kind in MM_PARSER_MAP) | {
    "audio",
    "file",
    "image",
    "text",
    "video",
}


def can_be_name(name: str) -> bool:
    """Whether its characters are those of a bundle's name."""
    return _NAME.fullmatch(name) is not None


def refuse_reserved(name: str) -> None:
    """Raises ConfigError: no bundle can have this name, on any server."""
    if not can_be_name(name):
        raise ConfigError(
            f"a bundle's name must be at most 128 letters, digits or . _ : / @ -, and begin with a letter or a digit; "
            f"found {name!r}"
        )
    if ROUTE in f"/{name}/":
        raise ConfigError(f"the name {name!r} is taken: routes have {ROUTE!r} between a name and a fact's id")
    if name.lower() in PART_KINDS:
        raise ConfigError(f"the name {name!r} is taken: vLLM reads it as a kind of message content")
    if PIN.fullmatch(name):
        raise ConfigError(f"the name {name!r} is taken: requests that end so are pinned to a version")


class ServedNames(dict[str, LoRARequest]):
    """vLLM's table of adapters, in which the names of bundles are found, but not listed."""

    def __init__(self, adapters: Mapping[str, LoRARequest], state: ServerState, base_model: str) -> None:
        super().__init__(adapters)
        self._state, self._base_model = state, base_model

    def __contains__(self, model: object) -> bool:
        return super().__contains__(model) or (isinstance(model, str) and self._memory(model) is not None)

    def __missing__(self, model: str) -> LoRARequest:
        if (found := self._memory(model)) is None:
            raise KeyError(model)
        return found

    def get(self, model: str, default: Any = None) -> Any:
        """As `dict.get`, for the names of bundles too."""
        try:
            return self[model]
        except KeyError:
            return default

    def _memory(self, model: str) -> MemoryRequest | None:
        name, digest = unpinned(model)
        try:
            served = self._state.find(name)
        except StateError as error:  # nobody knows whether there is such a bundle
            raise RetryableRequestError(str(error)) from error
        if served is None or not served.digest.startswith(digest):
            return None
        return MemoryRequest(
            lora_name=model,
            lora_int_id=adapter_number(f"{name} {served.digest}"),
            lora_path=served.digest,  # shown to everybody as the model's root
            base_model_name=self._base_model,
        )


class Names:
    """See the module docstring. It belongs to the event loop of its API process."""

    def __init__(
        self, models: OpenAIServingModels, state: ServerState, config: InduceKVConfig, vllm_config: VllmConfig
    ) -> None:
        models.lora_requests = ServedNames(models.lora_requests, state, models.base_model_paths[0].name)
        self._models, self._state, self._config, self._vllm_config = models, state, config, vllm_config

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self._state.find(name) is not None

    def check_name(self, name: str, *, replace: bool) -> None:
        """
        Args:
            replace: the name may stand for a bundle.

        Raises:
            ConfigError: it cannot be the name of a bundle, or is taken.
            CapacityError: no more names may be served.
        """
        refuse_reserved(name)
        if self._models.is_base_model(name):
            raise ConfigError(f"the name {name!r} is taken by the served model")
        if name in self._models.lora_requests and name not in self:
            raise ConfigError(f"the name {name!r} is taken by a LoRA adapter")
        if name in self:
            if not replace:
                raise ConfigError(f'a memory bundle {name!r} is loaded already; set "replace" to true to replace it')
        elif (loaded := self._state.num_names()) >= MAX_NAMES:
            raise CapacityError(f"{loaded} bundles are loaded, and no more are allowed")

    def check_memory(self, name: str, memory: ServedBundle) -> None:
        """Raises UnsupportedModel: it cannot be served here, or not beside others if it is to be shared."""
        self._check_adapters(name, memory)
        if name == self._config.shared:
            require_shareable(name, memory)

    def _check_adapters(self, name: str, memory: ServedBundle) -> None:
        config, records = self._vllm_config.lora_config, memory.metadata.task_adapters
        may_mix = may_mix_adapters(self._vllm_config)
        if not records:
            if config is not None and not may_mix:
                raise UnsupportedModel(
                    f"the server runs with LoRA, but the keys and payloads of bundle {name!r} were made without one"
                )
            return
        if config is None:
            raise UnsupportedModel(f"bundle {name!r} sends tasks to LoRA adapters: start the server with --enable-lora")
        if not may_mix:
            raise UnsupportedModel(
                f"bundle {name!r} sends tasks to LoRA adapters, which vLLM on CPUs mixes up with other requests of a "
                f"batch unless the server runs with --enforce-eager ({ADAPTERS})"
            )
        for record in records:
            if record.rank > config.max_lora_rank:
                raise UnsupportedModel(
                    f"bundle {name!r}: the adapter of task {record.task!r} has rank {record.rank}, "
                    f"the server's --max-lora-rank is {config.max_lora_rank}"
                )

    def earlier(self, name: str, digest: str | None) -> list[VersionRecord]:
        """The versions that are kept of a name behind the served one, the newest first: all, or that of `digest`.

        Raises:
            UnknownBundle: no bundle of this name is loaded.
            ConfigError: it keeps no version of `digest`.
        """
        self._state.served(name)
        _, *earlier = self._state.records(name)
        found = [each for each in earlier if digest in (None, each.digest)]
        if digest is not None and not found:
            kept = ", ".join(each.digest for each in earlier) or "none"
            raise ConfigError(
                f"memory bundle {name!r} has no earlier version of digest {digest:.100}; kept are: {kept}"
            )
        return found
