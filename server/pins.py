"""Requests pinned to a version: the model "NAME@DIGEST" is the bundle NAME, while it stands for that content."""

from __future__ import annotations

import re
from typing import Any

from vllm.lora.request import LoRARequest

from inducekv_vllm.engine.memory_engine import MemoryRequest

PIN = re.compile(r"(?P<name>.+)@(?P<digest>[0-9a-f]{12,64})")  # a digest, or how it begins


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
