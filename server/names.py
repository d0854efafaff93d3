"""What one API process serves: its names, the versions that they stand for, and the requests that use them.

Names are entries of vLLM's table of adapters, so every OpenAI route lists and accepts them. A request may be pinned to
a version: the model "NAME@DIGEST" is the bundle NAME, while it stands for that content.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from vllm.config import VllmConfig
from vllm.entrypoints.openai.models.serving import OpenAIServingModels
from vllm.lora.request import LoRARequest

from inducekv_vllm.bundle import AdapterRecord
from inducekv_vllm.errors import CapacityError, ConfigError, UnknownBundle, UnsupportedModel
from inducekv_vllm.frontend.memory_engine import Lease, MemoryRequest
from inducekv_vllm.frontend.served_bundle import ServedBundle
from inducekv_vllm.teaching import ROUTE
from inducekv_vllm.vllm_seams.requirements import groups_adapters

from .metrics import RegistryMetrics
from .schemas import NAME_PATTERN
from .state import Snapshot, VersionRecord

try:
    from vllm.renderers.chat_utils import MM_PARSER_MAP
except ImportError:  # vLLM 0.33 has it elsewhere
    from vllm.renderers.chat_utils.chat_message import MM_PARSER_MAP  # type: ignore[no-redef,import-not-found]

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


def unpinned(model: str) -> tuple[str, str]:
    """The name and the beginning of the digest; a model that is not pinned is a name, and any digest will do: ""."""
    match = PIN.fullmatch(model)
    return (match["name"], match["digest"]) if match else (model, "")


class ServedNames(dict[str, LoRARequest]):
    """vLLM's table of adapters, in which pinned names are found, but not listed."""

    def __contains__(self, model: object) -> bool:
        return super().__contains__(model) or (isinstance(model, str) and self._pinned(model) is not None)

    def __missing__(self, model: str) -> LoRARequest:
        if (found := self._pinned(model)) is None:
            raise KeyError(model)
        return found

    def get(self, model: str, default: Any = None) -> Any:
        """As `dict.get`, for pinned names too."""
        try:
            return self[model]
        except KeyError:
            return default

    def _pinned(self, model: str) -> MemoryRequest | None:
        name, digest = unpinned(model)
        handle = super().get(name)
        if not digest or not isinstance(handle, MemoryRequest) or not handle.lora_path.startswith(digest):
            return None
        return MemoryRequest(
            lora_name=model,
            lora_int_id=handle.lora_int_id,
            lora_path=handle.lora_path,
            base_model_name=handle.base_model_name,
        )


@dataclass(eq=False)
class Version:
    """One content that is resident on the workers."""

    memory: ServedBundle
    resident_bytes: int  # in the pool of one worker rank
    names: set[str] = field(default_factory=set)  # that stand for it
    active: int = 0  # requests of this API process

    @property
    def task_adapters(self) -> dict[str, LoRARequest]:
        return task_adapters(self.memory)


class Names:
    """See the module docstring. It belongs to the event loop of its API process."""

    def __init__(
        self, models: OpenAIServingModels, metrics: RegistryMetrics, left: Callable[[ServedBundle], None]
    ) -> None:
        """`left` is called, once, with a version that drains and that no request of this process uses."""
        models.lora_requests = ServedNames(models.lora_requests)
        self._models, self._metrics, self._left = models, metrics, left
        self._draining: frozenset[str] = frozenset()  # what this process has not left
        self.records: dict[str, tuple[VersionRecord, ...]] = {}  # of each name, the version served first
        self.versions: dict[str, Version] = {}  # by digest

    def follow(self, snapshot: Snapshot) -> None:
        """Serve what a snapshot has. Without an await, so no request sees an intermediate state."""
        for digest, (memory, resident_bytes) in snapshot.contents.items():
            if digest not in self.versions:
                self.versions[digest] = Version(memory, resident_bytes)
        for name in self.records.keys() - snapshot.versions.keys():
            self._remove(name)
        for name, (newest, *_) in snapshot.versions.items():
            self._point(name, newest.digest)
        self.records = snapshot.versions
        for digest in [each for each, version in self.versions.items() if each not in snapshot.contents]:
            if not self.versions[digest].active:
                del self.versions[digest]
        self._metrics.holds(self.versions.values())
        self._draining = snapshot.draining
        for digest in snapshot.draining:
            self._leave_if_idle(digest)

    def _leave_if_idle(self, digest: str) -> None:
        version = self.versions.get(digest)
        if digest in self._draining and version is not None and not version.active:
            self._draining -= {digest}
            self._left(version.memory)

    def _point(self, name: str, digest: str) -> None:
        version = self.versions[digest]
        if name in version.names:
            return
        if name in self.records:
            self.of(name).names.discard(name)
        version.names.add(name)
        self._models.lora_requests[name] = MemoryRequest(
            lora_name=name,
            lora_int_id=_number(f"{name} {digest}"),
            lora_path=digest,  # shown to everybody as the model's root
            base_model_name=self._models.base_model_paths[0].name,
        )
        self._metrics.pointed(name, version)

    def _remove(self, name: str) -> None:
        self.of(name).names.discard(name)
        del self._models.lora_requests[name]
        self._metrics.unloaded(name)

    def __contains__(self, name: object) -> bool:
        return name in self.records

    def of(self, name: str) -> Version:
        """Raises UnknownBundle: no bundle of this name is loaded."""
        try:
            return self.versions[self.records[name][0].digest]
        except KeyError:
            raise UnknownBundle(f"no memory bundle {name!r} is loaded") from None

    @contextlib.contextmanager
    def lease(self, model: str) -> Iterator[Lease]:
        """Keep the current version of a name resident until the context ends; the model may be pinned.

        Raises:
            UnknownBundle: no bundle of this name is loaded, or it does not stand for the version that is asked for.
            UnsupportedModel: its adapter is no longer loaded.
        """
        name, digest = unpinned(model)
        version = self.of(name)
        memory = version.memory
        if not memory.digest.startswith(digest):
            raise UnknownBundle(f"memory bundle {name!r} stands for {memory.digest}, not for {digest}")
        adapter = self.adapter(name, memory.adapter) if memory.adapter is not None else None
        version.active += 1
        try:
            yield Lease(memory, adapter, version.task_adapters, self._metrics.of_requests(name))
        finally:
            version.active -= 1
            if not version.active:
                self._leave_if_idle(memory.digest)

    def adapter(self, name: str, adapter: str) -> LoRARequest:
        """The LoRA adapter that the bundle `name` needs. Raises UnsupportedModel: it is not loaded."""
        request = self._models.lora_requests.get(adapter)
        if request is None or isinstance(request, MemoryRequest):
            loaded = sorted(n for n, r in self._models.lora_requests.items() if not isinstance(r, MemoryRequest))
            raise UnsupportedModel(
                f"bundle {name!r} needs the LoRA adapter {adapter!r}; loaded are: {', '.join(loaded) or 'none'}"
            )
        return request

    def check_name(self, name: str, *, replace: bool, at_most: int) -> None:
        """
        Args:
            replace: the name may stand for a bundle.
            at_most: so many names may be served.

        Raises:
            ConfigError: it cannot be the name of a bundle, or is taken.
            CapacityError: no more names may be served.
        """
        if not _NAME.fullmatch(name):
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
        if name in self and not replace:
            raise ConfigError(f'a memory bundle {name!r} is loaded already; set "replace" to true to replace it')
        if name not in self and len(self.records) >= at_most:
            raise CapacityError(f"{len(self.records)} bundles are loaded, and no more are allowed (max_bundles)")

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
        return sorted(name for name in self.records if self.of(name).memory.adapter == adapter)

    def earlier(self, name: str, digest: str | None) -> list[VersionRecord]:
        """The versions that are kept of a name behind the served one, the newest first: all, or that of `digest`.

        Raises:
            UnknownBundle: no bundle of this name is loaded.
            ConfigError: it keeps no version of `digest`.
        """
        self.of(name)
        _, *earlier = self.records[name]
        found = [each for each in earlier if digest in (None, each.digest)]
        if digest is not None and not found:
            kept = ", ".join(each.digest for each in earlier) or "none"
            raise ConfigError(
                f"memory bundle {name!r} has no earlier version of digest {digest:.100}; kept are: {kept}"
            )
        return found

    @property
    def task_adapters(self) -> list[LoRARequest]:
        """Of all tasks of all versions that are resident."""
        return [adapter for version in self.versions.values() for adapter in version.task_adapters.values()]


def task_adapters(memory: ServedBundle) -> dict[str, LoRARequest]:
    """The LoRA adapters of a bundle's tasks. The prefix cache tells adapters apart by name."""
    return {
        record.task: LoRARequest(
            f"inducekv-{record.digest}", _number(record.digest), str(adapter_folder(memory, record))
        )
        for record in memory.metadata.task_adapters
    }


def adapter_folder(memory: ServedBundle, record: AdapterRecord) -> Path:
    """The folder of a task's adapter; a relative path is relative to the bundle's folder."""
    return Path(memory.path).parent / record.path


def _number(text: str) -> int:
    """Of an adapter, the same in every API process, and far from those that vLLM counts."""
    return (1 << 30) + int(hashlib.sha256(text.encode()).hexdigest()[:7], 16)
