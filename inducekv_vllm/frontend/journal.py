"""What a server records of the requests that its engine client answers."""

from typing import Any, Protocol

from ..protocol import Decision
from .served_bundle import ServedBundle


class EngineJournal(Protocol):
    """It is told before each answer, and at the end of those that are traced."""

    def note_decision(self, name: str, memory: ServedBundle, decision: Decision) -> None:
        """An answer of the bundle of this name begins, as it was decided."""
        ...

    def note_fact(self, name: str, fact: str) -> None:
        """An answer from the fact of this id begins."""
        ...

    async def record_answer(self, request_id: str, owner: str, trace: dict[str, Any]) -> None:
        """Record an answer that is about to begin; only with the setting `audit_answers`.

        Args:
            owner: the digest of the key that asked; empty without one.
            trace: see `inducekv_vllm.frontend.trace.describe`.

        Raises:
            InduceKVError: it cannot be recorded, so there is no answer.
        """
        ...

    async def put_trace(self, owner: str, cache_salt: str | None, request_id: str, trace: dict[str, Any]) -> None:
        """Keep what a request was answered with."""
        ...
