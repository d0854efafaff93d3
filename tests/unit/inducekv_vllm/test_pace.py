"""Background work rests between its pieces while requests run, and only then."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from inducekv_vllm import pace
from inducekv_vllm.bundle import read_bundle, write_bundle
from inducekv_vllm.facts import QuestionIndex
from inducekv_vllm.pace import beside_requests, rest
from tests.bundles import random_bundle


def test_requests_go_first_before_each_piece_that_is_done_beside_them(monkeypatch: pytest.MonkeyPatch) -> None:
    now, asked = 5.0, list[float]()  # CPU time of the thread, in seconds
    monkeypatch.setattr(pace.time, "thread_time", lambda: now)

    def go_first() -> float:
        asked.append(now)
        return 1.0 if now < 9.0 else 0.0  # then there are none

    with beside_requests(go_first):
        for moment in (5.0, 5.5, 5.9, 6.0, 6.5, 9.0, 9.1, 9.2):
            now = moment
            rest()
    rest()
    assert asked == [5.0, 6.0, 9.0, 9.1, 9.2]


def test_the_next_work_asks_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pace.time, "thread_time", lambda: 5.0)
    asked = list[None]()
    for _ in range(2):
        with beside_requests(lambda: asked.append(None) or 1.0):
            rest()
            rest()
    assert len(asked) == 2


@pytest.fixture
def rests() -> Iterator[list[None]]:
    """Of work whose every rest finds no request."""
    found = list[None]()
    with beside_requests(lambda: found.append(None) or 0.0):
        yield found


def test_a_bundle_is_checked_in_pieces_that_do_not_grow_with_it(
    rests: list[None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("inducekv_vllm.bundle.tensors.AT_ONCE", 100)
    path = tmp_path / "bundle.safetensors"
    write_bundle(bundle := random_bundle(num_entries=400, seed=1), path)
    rests.clear()
    read_bundle(path)
    values = sum(tensor.numel() for tensor in bundle.tensors().values())
    assert len(rests) >= 2 * values / 100  # for NaN, and for the digest


def test_each_question_of_a_bundle_is_read_in_a_piece_of_its_own(rests: list[None]) -> None:
    QuestionIndex([f"What is code {number} of the tower?" for number in range(20)])
    assert len(rests) == 20
