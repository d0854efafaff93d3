"""The names of one API process, the versions that they stand for, and the requests that use them.

Names are entries of vLLM's table of adapters, so every OpenAI route lists and accepts them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from vllm.entrypoints.openai.models.serving import OpenAIServingModels
from vllm.lora.request import LoRARequest

from inducekv_vllm.engine.memory_engine import Lease, MemoryRequest
from inducekv_vllm.errors import UnknownBundle, UnsupportedModel

from .metrics import RegistryMetrics
from .pins import ServedNames, unpinned
from .version import Version


class NamedVersions:
    """See the module docstring. It belongs to the server's event loop."""

    def __init__(
        self, models: OpenAIServingModels, metrics: RegistryMetrics, on_idle: Callable[[Version], None]
    ) -> None:
        """`on_idle` is called when a name or a request has left a version."""
        models.lora_requests = ServedNames(models.lora_requests)
        self._models = models
        self._metrics = metrics
        self._on_idle = on_idle
        self.versions: dict[str, Version] = {}  # by digest
        self.by_name: dict[str, Version] = {}

    def __contains__(self, name: object) -> bool:
        return name in self.by_name

    def of(self, name: str) -> Version:
        """Raises UnknownBundle: no bundle of this name is loaded."""
        try:
            return self.by_name[name]
        except KeyError:
            raise UnknownBundle(f"no memory bundle {name!r} is loaded") from None

    def point(self, name: str, version: Version, path: str, handle_id: int) -> None:
        """Point `name` to `version`. Without an await, so no request sees an intermediate state.

        Args:
            path: what the name was loaded from.
            handle_id: of its handle among vLLM's adapters. Never sent to the engine, but must be unique.
        """
        previous = self.by_name.get(name)
        handle = MemoryRequest(
            lora_name=name,
            lora_int_id=handle_id,
            lora_path=version.memory.digest,  # shown to everybody as the model's root
            base_model_name=self._models.base_model_paths[0].name,
        )
        self.by_name[name] = version
        self._models.lora_requests[name] = handle
        version.names[name] = path
        self._metrics.pointed(name, version)
        if previous is not None and previous is not version:
            previous.names.pop(name, None)
            self._on_idle(previous)
        self._metrics.holds(self.versions.values())

    def remove(self, name: str) -> Version:
        """Take a name away; return the version that it stood for."""
        version = self.by_name.pop(name)
        del self._models.lora_requests[name]
        version.names.pop(name, None)
        self._metrics.unloaded(name)
        self._on_idle(version)
        return version

    @contextlib.contextmanager
    def lease(self, model: str) -> Iterator[Lease]:
        """Keep the current version of a name resident until the context ends; the model may be pinned (`pins.py`).

        Raises:
            UnknownBundle: no bundle of this name is loaded, or it does not stand for the version that is asked for.
            UnsupportedModel: its adapter is no longer loaded.
        """
        name, digest = unpinned(model)
        version = self.of(name)
        if not version.memory.digest.startswith(digest):
            raise UnknownBundle(f"memory bundle {name!r} stands for {version.memory.digest}, not for {digest}")
        adapter = version.memory.adapter
        lease = Lease(
            version.memory,
            self.adapter(name, adapter) if adapter is not None else None,
            version.task_adapters,
            self._metrics.of_requests(name),
        )
        version.active += 1
        try:
            yield lease
        finally:
            version.active -= 1
            self._on_idle(version)

    def adapter(self, name: str, adapter: str) -> LoRARequest:
        """The LoRA adapter that the bundle `name` needs. Raises UnsupportedModel: it is not loaded."""
        request = self._models.lora_requests.get(adapter)
        if request is None or isinstance(request, MemoryRequest):
            loaded = sorted(n for n, r in self._models.lora_requests.items() if not isinstance(r, MemoryRequest))
            raise UnsupportedModel(
                f"bundle {name!r} needs the LoRA adapter {adapter!r}; loaded are: {', '.join(loaded) or 'none'}"
            )
        return request

    def users_of_adapter(self, adapter: str) -> list[str]:
        """List the bundles that need this LoRA adapter."""
        return sorted(name for name, version in self.by_name.items() if version.memory.adapter == adapter)
