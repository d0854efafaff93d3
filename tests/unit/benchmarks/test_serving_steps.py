"""The profile of a decoding step: which events count, and which steps."""

from types import SimpleNamespace
from typing import Any

from torch.autograd import DeviceType

from benchmarks.serving import step_engine


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
