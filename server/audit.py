"""The audit log of a server: every change of its bundles, and if asked for, every answer; never any content.

A change is on the disk before it takes effect and before it is acknowledged. Answers reach the operating system before
their first token leaves the server, and the disk within `SYNC_S`: a server that is killed loses none, a machine that
loses power the last ones. A thread waits for the disk, so that requests go on meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final

from inducekv_vllm import __version__
from inducekv_vllm.errors import ConfigError
from inducekv_vllm.files.audit_chain import AuditWriter
from inducekv_vllm.host.logs import logger_of

from .access import key_digest

logger = logger_of(__name__)
SYNC_S: Final = 1.0
KEY_DIGITS: Final = 16  # of a key's digest
WRONG_KEYS: Final = 10  # so many are recorded, then how many more there were in the time
WRONG_KEYS_S: Final = 60.0


class AuditLog:
    """See the module docstring. Without a file it records nothing. It belongs to an API process's event loop."""

    def __init__(
        self, path: str | None = None, *, answers: bool = False, admin_key: str | None = None, is_first: bool = True
    ) -> None:
        """Open the log and record the start of the server.

        Args:
            answers: record answers too.
            admin_key: recorded as its digest.
            is_first: of the server's API processes; it alone records the start.

        Raises:
            ConfigError: the file cannot be used.
        """
        self._writer = None if path is None else AuditWriter(path)
        self.records_answers = answers and path is not None
        self._sync: asyncio.TimerHandle | None = None
        self._wrong_keys = 0  # since the timer began
        self._wrong_keys_end: asyncio.TimerHandle | None = None
        self._disk = ThreadPoolExecutor(1, "audit-log")  # of its own: a disk that hangs takes no thread from others
        if self._writer is not None and is_first:
            self._writer.append("start", {"version": __version__, "admin_key": _digest(admin_key)})
            self._writer.sync()

    def close(self) -> None:
        """Wait until all that was recorded is on the disk."""
        if self._sync is not None:
            self._sync.cancel()
            self._sync_later()
        if self._wrong_keys_end is not None:
            self._wrong_keys_end.cancel()
            self._end_wrong_keys()
        self._disk.shutdown()
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    async def change(self, event: str, **facts: Any) -> None:
        """Record a change that is about to take effect; it is on the disk when this returns.

        If the disk fails or hangs until the change is given up, the record stays, and a refusal follows it.

        Raises:
            ConfigError: it cannot be recorded.
        """
        if self._writer is not None:
            self._writer.append(event, facts)
            await asyncio.get_running_loop().run_in_executor(self._disk, self._writer.sync)

    def note(self, event: str, **facts: Any) -> None:
        """Record what has happened already. It is not synced: whoever is refused should not make the disk work."""
        if self._writer is None:
            return
        try:
            self._writer.append(event, facts)
        except ConfigError as error:
            logger.error("the event %r could not be recorded: %s", event, error)

    def refusal(self, change: str, name: str | None, by: str, reason: str) -> None:
        """Record a change that was refused.

        Args:
            name: None if whoever asks is not the admin. Anybody can do that, so only the first few are recorded.
        """
        if name is None and not self._may_note_wrong_key():
            return
        self.note("refusal", change=change, name=name and f"{name:.200}", by=by, reason=f"{reason:.1000}")

    def _may_note_wrong_key(self) -> bool:
        if self._wrong_keys_end is None:
            self._wrong_keys_end = asyncio.get_running_loop().call_later(WRONG_KEYS_S, self._end_wrong_keys)
        self._wrong_keys += 1
        return self._wrong_keys <= WRONG_KEYS

    def _end_wrong_keys(self) -> None:
        if (more := self._wrong_keys - WRONG_KEYS) > 0:
            self.note(
                "refusal", change=None, name=None, by=None, reason=f"{more} more without the admin key", count=more
            )
        self._wrong_keys, self._wrong_keys_end = 0, None

    async def answer(self, request_id: str, owner: str, trace: Mapping[str, Any]) -> None:
        """Record an answer that is about to begin.

        Args:
            owner: the digest of the key that asked; empty without one.
            trace: see `inducekv_vllm.engine.trace.describe_injection`.

        Raises:
            ConfigError: it cannot be recorded.
        """
        if self._writer is None or not self.records_answers:
            return
        facts = {
            "request": request_id,
            "by": owner[:KEY_DIGITS] or None,
            "name": trace["bundle"],
            "digest": trace["digest"],
            "task": trace["gate"] and trace["gate"]["task"],
            "entries": {entry["id"]: entry["weight"] for entry in trace["entries"]},
        }
        self._writer.append("answer", facts)
        if self._sync is None:
            self._sync = asyncio.get_running_loop().call_later(SYNC_S, self._sync_later)

    def _sync_later(self) -> None:
        self._sync = None
        if self._writer is not None:
            self._disk.submit(self._writer.sync).add_done_callback(_report)


def _report(done: Future[None]) -> None:
    if not done.cancelled() and (error := done.exception()) is not None:
        logger.error("the audit log could not be synced: %s", error)


def _digest(key: str | None) -> str | None:
    """The beginning of a key's SHA-256: it tells keys apart."""
    return None if key is None else key_digest(key).hex()[:KEY_DIGITS]
