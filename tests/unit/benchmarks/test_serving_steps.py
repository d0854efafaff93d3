"""The profile of a decoding step: which events count, which steps, and that every method ends in a row of the file."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.autograd import DeviceType

from benchmarks.serving import step_engine, steps
from benchmarks.serving.step_record import StepRecord


def on_device(name: str, microseconds: float) -> Any:
    return SimpleNamespace(name=name, device_type=DeviceType.CUDA, device_time=microseconds)


def on_host(name: str) -> Any:
    return SimpleNamespace(name=name, device_type=DeviceType.CPU)


def test_a_row_has_the_launches_copies_and_times_of_one_step() -> None:
    events = [on_device("gemm", 10.0)] * 8 + [on_device("Memcpy HtoD", 1.0)] * 2
    events += [on_host("cudaGraphLaunch")] * 2 + [on_host("aten::add")]
    row = step_engine.row_of([0.003, 0.002, 0.009], events, 2)
    assert (row["step_ms"], row["device_launches"], row["copies"], row["device_ms"]) == (3.0, 5.0, 1.0, 0.041)
    assert row["host_calls"] == {"cudaGraphLaunch": 1.0}
    assert row["kernels"] == {"gemm": [4.0, 40.0], "Memcpy HtoD": [1.0, 1.0]}


def test_on_a_cpu_there_is_the_time_of_a_step_alone() -> None:
    assert step_engine.row_of([0.002], [on_host("aten::add")], 2) == {"step_ms": 2.0}


def test_a_row_says_of_how_many_requests_memory_acted() -> None:
    found = ((None, False), ("t", False), ("t", True))
    closed, open_, went_on = (SimpleNamespace(task=task, same_pass=same) for task, same in found)
    assert step_engine.decided([closed, open_, went_on]) == {"open": 2, "same_pass": 1}
    assert step_engine.decided([]) == {}


def test_steps_are_timed_before_they_are_profiled_and_an_engine_is_left_as_it_was() -> None:
    def step() -> int:
        return 7

    engine = SimpleNamespace(step=step)
    with step_engine.watched(engine, 3) as seen:
        given = [engine.step() for _ in range(step_engine.SETTLING + step_engine.TIMED + 3 + step_engine.SPARE)]
    assert set(given) == {7}
    assert len(seen.seconds) == step_engine.TIMED
    assert engine.step is step


def test_a_method_has_a_time_limit() -> None:
    with pytest.raises(TimeoutError, match="not done in 0 s"), step_engine.limited(0.05):
        time.sleep(10)
    with step_engine.limited(0.05):
        pass
    time.sleep(0.1)  # no alarm comes later


def test_a_method_that_failed_does_not_stop_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    aborted = []

    def profiled(llm: object, offline: object, memory: object, requests: int, steps: int) -> dict[str, Any]:
        if requests == 64:
            raise ValueError("no room")
        return {"step_ms": 1.0}

    record = StepRecord(tmp_path / "steps.json")
    record.begin(model="tiny")
    monkeypatch.setattr(step_engine, "start_engine", lambda asked: None)
    monkeypatch.setattr(step_engine, "loaded", lambda llm, asked: (None, {"idle": None, "gated_closed": None}))
    monkeypatch.setattr(step_engine, "profiled", profiled)
    monkeypatch.setattr(step_engine, "abort_all", aborted.append)
    step_engine.main({"output": str(record.path), "requests": [1, 64], "steps": 2, "limit": 5.0})
    found = {"1": {"step_ms": 1.0}, "64": {"failed": "ValueError: no room"}}
    assert record.read() == {"model": "tiny", "rows": {"idle": found, "gated_closed": found}}
    assert len(aborted) == 2


@pytest.mark.parametrize(
    ("code", "why"),
    [("raise SystemExit(3)", "the engine ended with exit status 3"), ("import time; time.sleep(60)", "budget")],
)
def test_methods_that_an_engine_has_not_come_to_get_the_reason(
    code: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = StepRecord(tmp_path / "steps.json")
    record.begin()
    record.keep("idle", 1, {"step_ms": 1.0})
    monkeypatch.setattr(steps, "ENGINE", ("-c", code))
    args = SimpleNamespace(dtype="float32", requests=[1, 64], steps=2, limit=5.0, output=record.path)
    steps.profile({"idle": None}, tmp_path, tmp_path / "engine.log", 2.0, args)
    rows = json.loads(record.path.read_text())["rows"]["idle"]
    assert rows["1"] == {"step_ms": 1.0}
    assert why in rows["64"]["failed"]
