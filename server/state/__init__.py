"""The state of a server, in one SQLite file that all of its API processes share.

    versions    what each name stands for, the newest row first, and what it stood for before
    contents    each version's metadata, its bytes in the pool while it is resident, and its bundle, if it is kept
    pins        the names whose versions stay in the pool
    tags        the names that a resolver has found, with what it said of their files
    traces      what recent responses were answered with, by whom they belong to
    uses        when the facts of a name have last answered, to the minute
    audit       every change, and if asked for every answer, chained

What is resident and traces are of the running server. A change is one transaction with its record in the
audit chain, and on the disk before it is acknowledged: a server that was killed at any moment serves, when it starts
again, the last acknowledged version or the one that it was about to acknowledge.

Nothing of the names is in the memory of a process: a request reads what its name stands for, which takes microseconds.
    file.py      the file, its locks and transactions
    served.py    versions, contents, pins, tags
    notes.py     traces, uses, audit
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from inducekv_vllm.files import audit_chain

from .file import StateError, check_state_file
from .notes import Notes
from .served import Known, Pointed, Resident, Served, ServedState, Snapshot, VersionRecord, drop_unused

__all__ = [
    "Known",
    "Pointed",
    "Resident",
    "Served",
    "ServerState",
    "Snapshot",
    "StateError",
    "VersionRecord",
    "check_state_file",
]


class ServerState(ServedState, Notes):
    """See the module docstring. Any thread may call it."""

    def __init__(self, path: str | Path, *, keeps_bundles: bool, process: int = 0) -> None:
        """As `StateFile`. `keeps_bundles`: whether bundles are kept in it."""
        super().__init__(path, process=process)
        self.keeps_bundles, self._memories = keeps_bundles, {}

    def begin(self, details: Mapping[str, Any]) -> None:
        """A server starts: nothing is resident, and nothing is left of its predecessor's requests."""
        with self._transaction() as rows:
            audit_chain.append(rows, "start", details)
            for table in ("traces", "server"):
                rows.execute(f"DELETE FROM {table}")
            resident = rows.execute("SELECT digest FROM contents WHERE resident_bytes IS NOT NULL").fetchall()
            rows.execute("UPDATE contents SET resident_bytes = NULL WHERE resident_bytes IS NOT NULL")
            drop_unused(rows, [digest for (digest,) in resident])

    def begun(self, run: str) -> None:
        """The server of this run has loaded what it begins with."""
        with self._transaction() as rows:
            rows.execute("INSERT INTO server VALUES (?)", (run,))

    def has_begun(self, run: str) -> bool:
        return bool(self._read("SELECT 1 FROM server WHERE run = ?", (run,)))
