"""How long to wait between questions for what goes on in the background."""

from __future__ import annotations

import pytest

from inducekv_vllm.engine import wire


def test_pauses_grow_with_the_time_since_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    times = [100.0, 100.0, 100.01, 100.1, 100.15, 101.0, 200.0]
    monkeypatch.setattr(wire.time, "monotonic", iter(times).__next__)
    waits = wire.pauses()
    found = [next(waits) for _ in times[1:]]
    assert found == pytest.approx([0.002, 0.002, 0.01, 0.015, 0.02, 0.02])
