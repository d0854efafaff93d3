"""The file of `benchmarks.serving.steps`, which two processes write by turns: complete after every row."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from selector.runtime.files import replace_file


@dataclass(frozen=True)
class StepRecord:
    """Rows by method and number of requests."""

    path: Path

    def begin(self, **known: Any) -> None:
        """What is known before the first row; an earlier file is replaced."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._write(known | {"rows": {}})

    def read(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.path.read_text())
        return found

    def keep(self, method: str, requests: int, row: dict[str, Any]) -> None:
        result = self.read()
        result["rows"].setdefault(method, {})[str(requests)] = row
        self._write(result)

    def measured(self) -> set[tuple[str, int]]:
        """The methods and numbers of requests that have a row."""
        return {(name, int(n)) for name, rows in self.read()["rows"].items() for n in rows}

    def _write(self, result: dict[str, Any]) -> None:
        replace_file(self.path, (json.dumps(result, indent=1) + "\n").encode())
