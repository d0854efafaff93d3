"""What the API processes note for each other: events, attempted changes, traces, and when facts have answered."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from inducekv_vllm.files import audit_chain

from .file import StateFile

TRACES: Final = 1024
ATTEMPTS: Final = 256


@dataclass(frozen=True)
class Attempt:
    """The last change of a name, and those that run."""

    loading: bool
    change: str | None  # that has failed; None if none has since
    reason: str | None
    at: datetime | None
    left_digest: str | None  # what the name stood for when it was unloaded


class Notes(StateFile):
    """See the module docstring. They are of the running server, but for events and uses."""

    def note(self, event: str, details: Mapping[str, Any]) -> None:
        """Add to the audit chain what has happened already, or an answer that is about to begin."""
        with self._transaction(durable=False) as rows:
            audit_chain.append(rows, event, details)

    def attempt(self, name: str, *, loading: bool) -> None:
        """A change of a name begins; `loading` if it is a load."""
        with self._transaction(durable=False) as rows:
            rows.execute(
                "INSERT INTO attempts VALUES (?1, ?2, NULL, NULL, NULL, NULL) "
                "ON CONFLICT DO UPDATE SET loading = loading + ?2",
                (name, int(loading)),
            )
            rows.execute(
                "DELETE FROM attempts WHERE loading = 0 AND rowid <= (SELECT max(rowid) - ? FROM attempts)", (ATTEMPTS,)
            )

    def attempted(self, name: str, *, loading: bool, change: str, reason: str | None, says_something: bool) -> None:
        """A change of a name has ended, with a reason if it has failed, which may say nothing of the bundle."""
        now = datetime.now(UTC).isoformat()
        failure = (None, None, None) if reason is None else (change, reason, now)
        with self._transaction(durable=False) as rows:
            rows.execute("UPDATE attempts SET loading = max(loading - ?, 0) WHERE name = ?", (int(loading), name))
            if says_something:
                rows.execute("UPDATE attempts SET change = ?, reason = ?, at = ? WHERE name = ?", (*failure, name))

    def attempt_of(self, name: str) -> Attempt:
        found = self._read("SELECT loading, change, reason, at, left_digest FROM attempts WHERE name = ?", (name,))
        loading, change, reason, at, left = found[0] if found else (0, None, None, None, None)
        return Attempt(loading > 0, change, reason, at and datetime.fromisoformat(at), left)

    def note_uses(self, uses: Mapping[tuple[str, str], float]) -> None:
        """When facts have answered, by name and id, in seconds since the epoch. Names that are gone are left out."""
        with self._transaction(durable=False) as rows:
            rows.executemany(
                "INSERT INTO uses SELECT ?1, ?2, ?3 WHERE EXISTS (SELECT * FROM versions WHERE name = ?1) "
                "ON CONFLICT DO UPDATE SET at = max(at, excluded.at)",
                [(name, fact, at) for (name, fact), at in uses.items()],
            )

    def uses(self, name: str) -> dict[str, float]:
        """When the facts of a name have last answered; those that have not are missing."""
        return dict(self._read("SELECT fact, at FROM uses WHERE name = ?", (name,)))

    def put_trace(self, owner: str, salt: str | None, response: str, trace: dict[str, Any]) -> None:
        """Clients may choose the ids of their requests: a trace is found by its owner alone, and never overwritten."""
        row = (owner, json.dumps(salt), response, trace["digest"], json.dumps(trace))
        with self._transaction(durable=False) as rows:
            rows.execute("INSERT OR IGNORE INTO traces VALUES (?, ?, ?, ?, ?)", row)
            rows.execute("DELETE FROM traces WHERE rowid <= (SELECT max(rowid) - ? FROM traces)", (TRACES,))

    def traces(self, owner: str, salt: str | None, response: str) -> list[dict[str, Any]]:
        """Of one HTTP response: one for each prompt, or for each turn of a response with tool calls.

        vLLM names the engine requests of such a response by its id and a running number.
        """

        def of(request_id: str) -> dict[str, Any] | None:
            found = self._read(
                "SELECT trace FROM traces WHERE owner = ? AND salt = ? AND response = ?",
                (owner, json.dumps(salt), request_id),
            )
            return json.loads(found[0][0]) if found else None

        if (trace := of(response)) is not None:
            return [trace]
        for separator in "-_":
            found: list[dict[str, Any]] = []
            while (trace := of(f"{response}{separator}{len(found)}")) is not None:
                found.append(trace)
            if found:
                return found
        return []
