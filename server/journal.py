"""What an API process records of the requests that it answers, and of events that have happened already.

The state has it (`state.py`): answers and events in the audit chain, traces, and when facts have answered. The latest
decisions, for the page, are kept in memory.
"""

import asyncio
import time
from collections import deque
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Final

from inducekv_vllm.errors import InduceKVError
from inducekv_vllm.frontend.served_bundle import ServedBundle
from inducekv_vllm.frontend.trace import describe_facts, describe_gate, describe_missed
from inducekv_vllm.protocol import Decision
from inducekv_vllm.vllm_seams.config import InduceKVConfig
from inducekv_vllm.vllm_seams.logs import logger_of

from .access import KEY_DIGITS
from .state import ServerState

logger = logger_of(__name__)
STRANGERS, STRANGERS_S = 10, 60.0  # so many refusals of changes without the admin key are recorded in so long
NOTED_S: Final = 60.0  # how often it is written down which facts have answered
LATEST: Final = 50  # decisions that are kept for the page


class Journal:
    """See the module docstring. It belongs to the event loop of its API process."""

    def __init__(self, state: ServerState, config: InduceKVConfig) -> None:
        self._state = state
        self._strangers: deque[float] = deque(maxlen=STRANGERS)  # when they were refused and recorded
        self._unrecorded = 0
        self._uses: dict[tuple[str, str], float] = {}  # not written down yet: by name and fact, when it answered
        self._noted_at = 0.0
        self._noting: asyncio.Task[None] | None = None
        # Decisions of this API process, the last one first, without anything of the requests; None without the page.
        self.latest: deque[dict[str, Any]] | None = deque(maxlen=LATEST) if config.memory_page else None

    async def note(self, event: str, **details: Any) -> None:
        try:
            await asyncio.to_thread(self._state.note, event, details)
        except InduceKVError as error:
            logger.error("the event %r could not be recorded: %s", event, error)

    async def note_stranger(self, route: str, host: str, reason: str) -> None:
        """Record that somebody without the admin key asked for a change. Anybody can: only the first few a minute."""
        now = time.monotonic()
        if len(self._strangers) == STRANGERS and now - self._strangers[0] < STRANGERS_S:
            self._unrecorded += 1
            return
        self._strangers.append(now)
        unrecorded, self._unrecorded = self._unrecorded, 0
        await self.note(
            "refusal", change=route, name=None, by=f"unknown at {host}", reason=reason, unrecorded_before=unrecorded
        )

    # ---- requests ------------------------------------------------------------------------------------------------

    def note_decision(self, name: str, memory: ServedBundle, decision: Decision) -> None:
        """Keep for the page what a request is answered with, as it begins."""
        if self.latest is None:
            return
        gate, found = describe_gate(memory, decision), describe_facts(memory, decision)
        facts = [fact["id"] for fact in found if fact["withheld"] is None]
        now = datetime.now(UTC)
        missed = describe_missed(memory, decision)
        self.latest.appendleft(
            {"at": now, "bundle": name, "digest": memory.digest, "gate": gate, "facts": facts, "missed": missed}
        )

    async def record_answer(self, request_id: str, owner: str, trace: Mapping[str, Any]) -> None:
        """Record an answer that is about to begin.

        Args:
            owner: the digest of the key that asked; empty without one.
            trace: see `inducekv_vllm.frontend.trace.describe`.

        Raises:
            ConfigError, CapacityError: it cannot be recorded.
        """
        details = {"request": request_id, "by": owner[:KEY_DIGITS] or None, **_answered(trace)}
        if trace["shared"] is not None:
            details["shared"] = _answered(trace["shared"])
        await asyncio.to_thread(self._state.note, "answer", details)

    def note_fact(self, name: str, fact: str) -> None:
        """Facts are about to answer. It is written down once a minute, and before a name is taught more."""
        now = time.time()
        self._uses[name, fact] = now
        if now - self._noted_at >= NOTED_S:
            self._noted_at = now
            self._noting = asyncio.get_running_loop().create_task(self._note_uses())

    async def uses(self, name: str) -> dict[str, float]:
        """When the facts of a name have last answered, in seconds since the epoch. Raises ConfigError."""
        await self._note_uses()
        return await asyncio.to_thread(self._state.uses, name)

    async def _note_uses(self) -> None:
        uses, self._uses = self._uses, {}
        if not uses:
            return
        try:
            await asyncio.to_thread(self._state.note_uses, uses)
        except InduceKVError as error:
            logger.warning("which facts have answered cannot be noted: %s", error)

    async def put_trace(self, owner: str, cache_salt: str | None, request_id: str, trace: dict[str, Any]) -> None:
        await asyncio.to_thread(self._state.put_trace, owner, cache_salt, request_id, trace)

    async def traces(self, owner: str, cache_salt: str | None, response_id: str) -> list[dict[str, Any]]:
        """The traces of a response of any API process."""
        return await asyncio.to_thread(self._state.traces, owner, cache_salt, response_id)


def _answered(trace: Mapping[str, Any]) -> dict[str, Any]:
    """What the audit chain keeps of a memory's part in an answer."""
    return {
        "name": trace["bundle"],
        "digest": trace["digest"],
        "task": trace["gate"] and trace["gate"]["task"],
        "entries": {
            **{entry["id"]: entry["weight"] for entry in trace["entries"]},
            **{fact["id"]: 1.0 for fact in trace["facts"] if fact["withheld"] is None},
        },
    }
