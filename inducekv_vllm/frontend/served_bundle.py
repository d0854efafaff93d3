"""The API process's part of a bundle: its metadata. The workers have the rest.

Shapes: B entries.
"""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass
from functools import cached_property

from ..backbone.stored_facts import StoredQuestions
from ..bundle import Bundle, EntryRecord
from ..bundle.lookup import DatedEntries
from ..errors import UnsupportedModel
from ..retrieval.entry_terms import Weighting
from ..teaching import FactList


@dataclass(frozen=True)
class ServedBundle(DatedEntries):
    """One version of a memory. A changed file is another version with another digest."""

    path: str  # the workers read the same file
    file_bytes: int

    @cached_property
    def questions(self) -> StoredQuestions:
        """Of its facts. With very many it takes seconds the first time."""
        return StoredQuestions(self.metadata.facts, self.metadata.gate_tasks)

    @property
    def has_questions(self) -> bool:
        """Whether they are made."""
        return "questions" in vars(self)

    async def stored_questions(self) -> StoredQuestions:
        """The same, made in a thread."""
        return self.questions if self.has_questions else await asyncio.to_thread(lambda: self.questions)

    @cached_property
    def fact_list(self) -> FactList:
        """With very many facts it takes seconds the first time."""
        return FactList(self.metadata.facts)

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
    def needs_decision(self) -> bool:
        """Whether entries, weights or facts depend on the prompt."""
        return self.metadata.gate is not None or self.weighting != "uniform" or bool(self.metadata.facts)

    @property
    def retrieves(self) -> bool:
        """Whether a request has the entries nearest to it: it has all of its task's otherwise."""
        return self.weighting != "uniform" and self.num_entries > 0

    @property
    def acts_alone(self) -> str | None:
        """Why nothing else may act on its requests; None if other decoupled memory may."""
        if self.metadata.task_adapters:
            return "sends tasks to LoRA adapters"
        return "is merged into self-attention" if self.num_entries and self.metadata.form == "merged" else None

    @property
    def acts_on_prompt(self) -> bool:
        """Whether some prompt position before the last one may be computed with memory, or with a task's adapter."""
        metadata = self.metadata
        return (
            metadata.form == "merged"
            or bool(metadata.task_adapters)
            or any(each != "generation" for each in metadata.activations.values())
        )


def require_shareable(name: str, memory: ServedBundle) -> None:
    """Raise UnsupportedModel if requests to other bundles cannot have this one as well."""
    if memory.acts_alone is not None:
        raise UnsupportedModel(f"bundle {name!r} {memory.acts_alone}: it cannot be shared (--memory-shared)")
