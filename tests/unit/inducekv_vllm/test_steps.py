"""When steps run: what is done beside them waits for their end, but not for long."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from inducekv_vllm.workers import steps as module
from inducekv_vllm.workers.steps import IDLE_WAIT_S, PATIENCE, PIECE_S, STEPPING_S, Steps


def test_after_a_step_the_next_one_may_follow_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now))
    steps, seen = Steps(), list[bool]()
    seen.append(steps.follow)
    steps.begin()
    now += 10 * STEPPING_S
    seen.append(steps.follow)
    steps.end()
    for _ in range(2):
        seen.append(steps.follow)
        now += 1.1 * STEPPING_S
    assert seen == [False, True, True, False]


def test_a_load_may_take_a_share_of_a_step_and_longer_while_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now))
    steps = Steps()
    assert steps.patience == IDLE_WAIT_S
    steps.begin()
    now += 2.0
    steps.end()
    assert steps.patience == PATIENCE * 2.0
    now += 1.1 * STEPPING_S
    assert steps.patience == IDLE_WAIT_S


def test_what_waits_for_the_end_of_a_long_step_goes_on_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LONGEST_REST_S", 0.01)
    steps, seen = Steps(), list[float]()
    seen.append(steps.go_first())
    steps.begin()
    seen.append(steps.go_first())
    steps.end()
    seen.append(steps.go_first())
    assert seen == [0.0, PIECE_S, 0.0]
