"""Background work rests between its pieces while requests run, and only then."""

from __future__ import annotations

from pathlib import Path

import pytest

from inducekv_vllm import pace
from inducekv_vllm.bundle import read_bundle, write_bundle
from inducekv_vllm.facts import QuestionIndex
from inducekv_vllm.pace import beside_requests, rest
from tests.bundles import random_bundle


@pytest.fixture
def rests(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The rests; none is waited for, every piece is long enough for one, and the first ones too."""
    found: list[float] = []
    monkeypatch.setattr(pace.time, "sleep", found.append)
    monkeypatch.setattr(pace, "PIECE_S", 0.0)
    monkeypatch.setattr(pace, "UNPACED_S", 0.0)
    return found


def test_it_takes_a_quarter_of_a_core_while_requests_run(rests: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    clock = 0.0  # CPU time of the thread, in seconds
    monkeypatch.setattr(pace.time, "thread_time", lambda: clock)
    with beside_requests(lambda: False):
        clock += 2.0
        rest()
    rest()
    assert rests == []
    with beside_requests(lambda: True):
        clock += 2.0
        rest()
    assert rests == [6.0]


def test_work_of_a_few_milliseconds_is_done_in_one_go(rests: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    clock = 0.0
    monkeypatch.setattr(pace.time, "thread_time", lambda: clock)
    monkeypatch.setattr(pace, "UNPACED_S", 5.0)
    for _ in range(2):
        with beside_requests(lambda: True):
            for _ in range(3):  # the third piece ends behind the fifth second
                clock += 2.0
                rest()
    assert rests == [6.0] * 2


def test_a_bundle_is_checked_in_pieces_that_do_not_grow_with_it(
    rests: list[float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("inducekv_vllm.bundle.tensors.AT_ONCE", 100)
    path = tmp_path / "bundle.safetensors"
    write_bundle(bundle := random_bundle(num_entries=400, seed=1), path)
    with beside_requests(lambda: True):
        read_bundle(path)
    values = sum(tensor.numel() for tensor in bundle.tensors().values())
    assert len(rests) >= 2 * values / 100  # for NaN, and for the digest


def test_each_question_of_a_bundle_is_read_in_a_piece_of_its_own(rests: list[float]) -> None:
    with beside_requests(lambda: True):
        QuestionIndex([f"What is code {number} of the tower?" for number in range(20)])
    assert len(rests) == 20
