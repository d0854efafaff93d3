"""The API process's part of a bundle: its metadata, and what it asks the workers for. They have the rest.

Shapes: B entries, T prompt tokens.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from vllm.lora.request import LoRARequest

from ..bundle import Bundle, EntryRecord
from ..bundle.activation import first_active_position
from ..bundle.lookup import DatedEntries
from ..protocol import DecideSpec, InjectionSpec, TaskAdapter
from ..retrieval.entry_terms import Weighting


@dataclass(frozen=True)
class ServedBundle(DatedEntries):
    """One version of a memory. A changed file is another version with another digest."""

    path: str  # the workers read the same file
    file_bytes: int

    @classmethod
    def from_bundle(cls, bundle: Bundle, path: str) -> ServedBundle:
        """Raises OSError if the file at `path` has been removed."""
        return cls(bundle.metadata, path, os.path.getsize(path))

    @property
    def digest(self) -> str:
        return self.metadata.digest

    @property
    def weighting(self) -> Weighting:
        return self.metadata.weighting

    @property
    def entries(self) -> tuple[EntryRecord, ...]:
        """[B]"""
        return self.metadata.entries

    @property
    def num_entries(self) -> int:
        return len(self.entries)

    @property
    def adapter(self) -> str | None:
        """The LoRA adapter that its requests run with, whether the gate is open or closed."""
        return self.metadata.adapter

    @property
    def needs_decision(self) -> bool:
        """Whether entries, weights or facts depend on the prompt."""
        return self.metadata.gate is not None or self.weighting != "uniform" or bool(self.metadata.facts)

    @property
    def acts_on_prompt(self) -> bool:
        """Whether some prompt position before the last one may be computed with memory, or with a task's adapter."""
        metadata = self.metadata
        return (
            metadata.form == "merged"
            or bool(metadata.task_adapters)
            or any(each != "generation" for each in metadata.activations.values())
        )

    def spec(
        self,
        top_k: int | None,
        remainder: bool,
        token_ids: Sequence[int],
        placeholders: Collection[int],
        owner: str = "",
        task_adapters: Mapping[str, LoRARequest] | None = None,
    ) -> DecideSpec | InjectionSpec | None:
        """What the workers shall do for a prompt [T]; None if there is nothing to inject: every entry has expired.

        Args:
            top_k: entries retrieved; None for all.
            remainder: weighting "sqrt" with `top_k`: entries not retrieved stay in the softmax with alpha = 0.
            placeholders: the ids of tokens that stand for media.
            owner: who may share a decision.
            task_adapters: adapters by task, of tasks that have one instead of entries.
        """
        if self.needs_decision:
            adapters = tuple((task, TaskAdapter.of(each)) for task, each in sorted((task_adapters or {}).items()))
            retrieval = self.weighting != "uniform" and self.num_entries > 0
            return DecideSpec(self.digest, retrieval, top_k, remainder, owner, adapters)
        alive = self.alive()
        if not alive:
            return None
        first_active = first_active_position(self.metadata.activation_of(None), token_ids, placeholders)
        expired = self.num_entries - len(alive)
        return InjectionSpec(self.digest, tuple(alive), (1.0,) * len(alive), False, first_active, expired)
