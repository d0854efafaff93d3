"""One content under the names that stand for it, and how the routes show it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm.lora.request import LoRARequest

from inducekv_vllm.engine.memory import Memory

from .history import VersionRecord
from .schemas import MemoryBundleCard, MemoryVersion


@dataclass(eq=False)
class Version:
    """A version that is resident on the workers."""

    memory: Memory
    resident_bytes: int  # in the pool of one worker rank
    task_adapters: dict[str, LoRARequest]  # by task
    names: dict[str, str] = field(default_factory=dict)  # its names, and the path that each was loaded from
    active: int = 0  # leases in this API process
    holders: set[int] = field(default_factory=set)  # other API processes that have it: see `followers.py`

    @property
    def is_unused(self) -> bool:
        """No name stands for it, and no request of any API process uses it."""
        return not (self.names or self.active or self.holders)

    def card(
        self, name: str, records: Sequence[VersionRecord], is_admin: bool, active_elsewhere: int = 0
    ) -> MemoryBundleCard:
        """What is shown of `name`, which stands for this version; `records` are those that are kept of the name."""
        memory = self.memory
        facts: dict[str, Any] = {
            field: getattr(memory.metadata, field)
            for field in ("digest", "budget", "payload_tokens", "form", "weighting", "activations", "adapter")
        }
        return MemoryBundleCard(
            name=name,
            path=self.names[name] if is_admin else None,
            entries=memory.num_entries,
            expired_entries=memory.num_entries - len(memory.alive()),
            task_adapters={t: adapter.lora_path if is_admin else None for t, adapter in self.task_adapters.items()},
            tasks=dict(Counter(entry.task for entry in memory.entries)),
            gate_tasks=list(memory.metadata.gate_tasks) or None,
            file_bytes=memory.file_bytes,
            resident_bytes=self.resident_bytes,
            active_requests=self.active + active_elsewhere,
            versions=[
                MemoryVersion(
                    digest=record.digest,
                    parent_digest=record.parent_digest,
                    loaded_at=record.loaded_at,
                    by=record.by if is_admin else None,
                    source=record.source if is_admin else None,
                )
                for record in records
            ],
            **facts,
        )
