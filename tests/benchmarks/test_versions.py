"""The benchmark of loading a version says whether it has reached its target."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from benchmarks.versions import run as versions


@pytest.mark.parametrize(("shared_s", "status"), [(0.25, 0), (0.26, 1)])
def test_the_exit_status_is_that_of_the_target(
    shared_s: float, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = {"full": 1.0, "shared": shared_s}

    def loads(url: str, *_: Any) -> dict[str, float]:
        slow = 3 if "--memory-state" in url else 1  # with a state folder the file is read whole: it has no target
        return {"ratio": slow * seconds["shared"] / seconds["full"]}

    def pairs(checkpoint: Path, entries: int, folder: Path, payload_tokens: int) -> Any:
        (folder / "full").write_bytes(b"0")
        content = versions.Content(folder / "full", 0)
        return [(content, content)]

    monkeypatch.setattr(versions, "make_contents", pairs)
    monkeypatch.setattr(versions, "serving", lambda flags, *_: nullcontext(" ".join(map(str, flags))))
    monkeypatch.setattr(versions, "measure", loads)
    monkeypatch.setattr(versions, "measure_parts", lambda *_: {})
    monkeypatch.setattr("sys.argv", ["run", "--output", str(tmp_path / "result.json")])
    assert versions.main() == status
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["target_ratio"], result["reached"]) == (0.25, status == 0)
