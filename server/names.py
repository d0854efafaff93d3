"""What one API process serves: names, the versions that they stand for, and the requests that use them.

The state has the names (`state.py`). vLLM's table of adapters finds them there, so every OpenAI route accepts them. A
request may ask for one version: the model "NAME@DIGEST" is the bundle NAME, while it stands for that content.

A version that a name stands for may have left the pool: then the name is *cold*, and a request waits until it is loaded
again (`residency.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from vllm.config import VllmConfig
from vllm.entrypoints.openai.models.serving import OpenAIServingModels
from vllm.exceptions import RetryableRequestError
from vllm.lora.request import LoRARequest

from inducekv_vllm.errors import CapacityError, ConfigError, InduceKVError, UnknownBundle, UnsupportedModel
from inducekv_vllm.frontend.memory_engine import Lease, MemoryRequest
from inducekv_vllm.frontend.served_bundle import ServedBundle
from inducekv_vllm.teaching import ROUTE
from inducekv_vllm.vllm_seams.requirements import groups_adapters

from .adapters import adapter_number, task_adapters
from .metrics import RegistryMetrics
from .recency import Recency
from .schemas import NAME_PATTERN
from .state import Known, Served, ServerState, VersionRecord

try:
    from vllm.renderers.chat_utils import MM_PARSER_MAP
except ImportError:  # vLLM 0.33 has it elsewhere
    from vllm.renderers.chat_utils.chat_message import MM_PARSER_MAP  # type: ignore[no-redef,import-not-found]

MAX_NAMES: Final = 100_000
PIN: Final = re.compile(r"(?P<name>.+)@(?P<digest>[0-9a-f]{12,64})")  # a digest, or how it begins
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


def unpinned(model: str) -> tuple[str, str]:
    """The name and the beginning of the digest; a model that is not pinned is a name, and any digest will do: ""."""
    match = PIN.fullmatch(model)
    return (match["name"], match["digest"]) if match else (model, "")


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
            served = self._state.served(name)
        except InduceKVError:  # it cannot be read: `Following` says so
            return None
        if served is None or not served.digest.startswith(digest):
            return None
        return MemoryRequest(
            lora_name=model,
            lora_int_id=adapter_number(f"{name} {served.digest}"),
            lora_path=served.digest,  # shown to everybody as the model's root
            base_model_name=self._base_model,
        )


@dataclass(eq=False)
class Version:
    """One content that is resident on the workers."""

    memory: ServedBundle
    resident_bytes: int  # in the pool of one worker rank
    is_named: bool = True  # whether a name stands for it
    is_pinned: bool = False  # whether a pinned name does
    active: int = 0  # requests of this API process
    held: int = 0  # HTTP requests of this API process that have asked for it, and not ended

    @property
    def is_used(self) -> bool:
        return bool(self.active or self.held)

    @property
    def task_adapters(self) -> dict[str, LoRARequest]:
        return task_adapters(self.memory)


class Names:
    """See the module docstring. It belongs to the event loop of its API process."""

    def __init__(
        self,
        models: OpenAIServingModels,
        state: ServerState,
        metrics: RegistryMetrics,
        left: Callable[[ServedBundle], None],
    ) -> None:
        """`left` is called with a version that no name stands for, when the last request of this process has ended."""
        models.lora_requests = ServedNames(models.lora_requests, state, models.base_model_paths[0].name)
        self._models, self._state, self._metrics, self._left = models, state, metrics, left
        self._leaving: set[str] = set()  # versions that may be about to leave the pool
        self.versions: dict[str, Version] = {}  # that are resident, by digest
        self.recency = Recency()
        self.unused = asyncio.Event()  # set when no request of this process uses some version any more

    async def follow(self) -> None:
        """See what is resident now."""
        exported = self._metrics.exported  # others may begin meanwhile
        snapshot = await asyncio.to_thread(self._state.snapshot, exported)
        for digest, found in snapshot.resident.items():
            version = self.versions.setdefault(digest, Version(found.memory, found.nbytes))
            version.is_named, version.is_pinned = found.is_named, found.is_pinned
            self.recency.came(digest)
        for digest in self.versions.keys() - snapshot.resident.keys():
            if not self.versions[digest].is_used:  # otherwise it became resident since the snapshot
                del self.versions[digest]
                self.recency.gone(digest)
        self._metrics.follow({name: snapshot.names.get(name) for name in exported}, self.versions)

    # ---- requests ------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def lease(self, model: str) -> Iterator[Lease]:
        """Keep the current version of a name resident until the context ends; the model may be pinned.

        Raises:
            UnknownBundle: no bundle of this name is loaded, or it does not stand for the version that is asked for.
            UnsupportedModel: its adapter is no longer loaded.
            RetryableRequestError: the version has left the pool.
        """
        name, digest = unpinned(model)
        served = self.served(name)
        if not served.digest.startswith(digest):
            raise UnknownBundle(f"memory bundle {name!r} stands for {served.digest}, not for {digest}")
        if (version := self._usable(served)) is None:
            raise RetryableRequestError(f"memory bundle {name!r} is not in the pool at this moment; please retry")
        memory = version.memory
        version.active += 1
        try:
            adapter = self.adapter(name, memory.adapter) if memory.adapter is not None else None
            metrics = self._metrics.of_requests(name, version)
            yield Lease(memory, version.task_adapters, adapter=adapter, metrics=metrics)
        finally:
            version.active -= 1
            self._end_use(version)

    def hold(self, served: Served) -> Callable[[], None] | None:
        """An HTTP request asks for a version; it is resident until the function is called. None: it is not resident."""
        if (version := self._usable(served)) is None:
            return None
        self.recency.used(served.digest)
        version.held += 1

        def end() -> None:
            version.held -= 1
            self._end_use(version)

        return end

    def _usable(self, served: Served) -> Version | None:
        """A version that is resident, and stays so while it is used."""
        digest, version = served.digest, self.versions.get(served.digest)
        if served.resident_bytes is None or digest in self._leaving:
            return None
        if not (version is not None and version.is_used) and not self._state.hold(digest):
            return None
        if version is None:  # it became resident a moment ago, and `follow` has not seen it yet
            version = self.versions[digest] = Version(self._state.memory(digest), served.resident_bytes)
        return version

    def _end_use(self, version: Version) -> None:
        if version.is_used:
            return
        digest = version.memory.digest
        self._state.let_go(digest)
        self.unused.set()
        with contextlib.suppress(InduceKVError):  # the state cannot be read
            if not self._state.is_named(digest):
                self._left(version.memory)

    @contextlib.contextmanager
    def leaving(self, digest: str) -> Iterator[bool]:
        """Whether no request of this process uses a version; none begins to within the context."""
        version = self.versions.get(digest)
        is_unused = digest not in self._leaving and not (version is not None and version.is_used)
        if is_unused:
            self._leaving.add(digest)
        try:
            yield is_unused
        finally:
            if is_unused:
                self._leaving.discard(digest)

    # ---- names ---------------------------------------------------------------------------------------------------

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self._state.served(name) is not None

    def served(self, name: str) -> Served:
        """What a name stands for. Raises UnknownBundle: no bundle of this name is loaded."""
        if (found := self._state.served(name)) is None:
            raise UnknownBundle(f"no memory bundle {name!r} is loaded")
        return found

    def records(self, name: str) -> tuple[VersionRecord, ...]:
        """The versions of a name, the served one first. Raises UnknownBundle: no bundle of this name is loaded."""
        self.served(name)
        return self._state.records(name)

    def known(self, name: str) -> Known:
        """All that is known of a name. Raises UnknownBundle: no bundle of this name is loaded."""
        if (found := self._state.known(name)) is None:
            raise UnknownBundle(f"no memory bundle {name!r} is loaded")
        return found

    def page(self, after: str, limit: int) -> list[tuple[str, str]]:
        """The next names in alphabetical order, with the digests that they stand for."""
        return self._state.page(after, limit)

    def adapter(self, name: str, adapter: str) -> LoRARequest:
        """The LoRA adapter that the bundle `name` needs. Raises UnsupportedModel: it is not loaded."""
        request = self._models.lora_requests.get(adapter)
        if request is None or isinstance(request, MemoryRequest):
            loaded = sorted(n for n, r in self._models.lora_requests.items() if not isinstance(r, MemoryRequest))
            raise UnsupportedModel(
                f"bundle {name!r} needs the LoRA adapter {adapter!r}; loaded are: {', '.join(loaded) or 'none'}"
            )
        return request

    def check_name(self, name: str, *, replace: bool) -> None:
        """
        Args:
            replace: the name may stand for a bundle.

        Raises:
            ConfigError: it cannot be the name of a bundle, or is taken.
            CapacityError: no more names may be served.
        """
        if not can_be_name(name):
            raise ConfigError(
                f"a bundle's name must be at most 128 letters, digits or . _ : / @ -, and begin with a letter or a "
                f"digit; found {name!r}"
            )
        if ROUTE in f"/{name}/":
            raise ConfigError(f"the name {name!r} is taken: routes have {ROUTE!r} between a name and a fact's id")
        if name.lower() in PART_KINDS:
            raise ConfigError(f"the name {name!r} is taken: vLLM reads it as a kind of message content")
        if PIN.fullmatch(name):
            raise ConfigError(f"the name {name!r} is taken: requests that end so are pinned to a version")
        if self._models.is_base_model(name):
            raise ConfigError(f"the name {name!r} is taken by the served model")
        if name in self._models.lora_requests and name not in self:
            raise ConfigError(f"the name {name!r} is taken by a LoRA adapter")
        if name in self:
            if not replace:
                raise ConfigError(f'a memory bundle {name!r} is loaded already; set "replace" to true to replace it')
        elif (loaded := self._state.num_names()) >= MAX_NAMES:
            raise CapacityError(f"{loaded} bundles are loaded, and no more are allowed")

    def check_adapters(self, name: str, memory: ServedBundle, vllm_config: VllmConfig) -> None:
        """Raises UnsupportedModel: its adapters cannot be served here."""
        config, records = vllm_config.lora_config, memory.metadata.task_adapters
        groups = groups_adapters(vllm_config)
        if memory.adapter is not None:
            self.adapter(name, memory.adapter)
        elif config is not None and not groups and not records:
            raise UnsupportedModel(
                f"the server runs with LoRA, but bundle {name!r} names no adapter: its keys and payloads were made "
                "without one"
            )
        if not records:
            return
        if config is None:
            raise UnsupportedModel(f"bundle {name!r} sends tasks to LoRA adapters: start the server with --enable-lora")
        if not groups:
            raise UnsupportedModel(
                f"bundle {name!r} sends tasks to LoRA adapters, which vLLM on CPUs mixes up with other requests of a "
                "batch (vllm-project/vllm#48421) unless the server runs with --enforce-eager"
            )
        for record in records:
            if record.rank > config.max_lora_rank:
                raise UnsupportedModel(
                    f"bundle {name!r}: the adapter of task {record.task!r} has rank {record.rank}, "
                    f"the server's --max-lora-rank is {config.max_lora_rank}"
                )

    def users_of_adapter(self, adapter: str) -> list[str]:
        """The names of bundles that need this LoRA adapter."""
        return self._state.users_of_adapter(adapter)

    def earlier(self, name: str, digest: str | None) -> list[VersionRecord]:
        """The versions that are kept of a name behind the served one, the newest first: all, or that of `digest`.

        Raises:
            UnknownBundle: no bundle of this name is loaded.
            ConfigError: it keeps no version of `digest`.
        """
        _, *earlier = self.records(name)
        found = [each for each in earlier if digest in (None, each.digest)]
        if digest is not None and not found:
            kept = ", ".join(each.digest for each in earlier) or "none"
            raise ConfigError(
                f"memory bundle {name!r} has no earlier version of digest {digest:.100}; kept are: {kept}"
            )
        return found

    def task_adapters_but(self, digest: str) -> list[LoRARequest]:
        """Of all tasks of all other versions that are resident."""
        others = [version for each, version in self.versions.items() if each != digest]
        return [adapter for version in others for adapter in version.task_adapters.values()]
