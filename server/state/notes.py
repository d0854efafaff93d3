"""What the API processes note for each other: events, traces, and when facts have answered."""

import json
from collections.abc import Mapping
from typing import Any, Final

from inducekv_vllm.files import audit_chain

from .file import StateFile

TRACES: Final = 1024


class Notes(StateFile):
    """See the module docstring. Traces are of the running server."""

    def note(self, event: str, details: Mapping[str, Any]) -> None:
        """Add to the audit chain what has happened already, or an answer that is about to begin."""
        with self._transaction(durable=False) as rows:
            audit_chain.append(rows, event, details)

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
