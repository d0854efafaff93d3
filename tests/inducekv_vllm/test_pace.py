"""Background work rests between its pieces while requests run, and only then."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from inducekv_vllm import pace
from inducekv_vllm.bundle import read_bundle, write_bundle
from inducekv_vllm.pace import PIECE_S, SHARE, beside_requests, rest
from tests.inducekv_vllm.bundles import random_bundle


@pytest.fixture
def rests(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How long each rest was, in seconds; none is waited for."""
    found: list[float] = []
    monkeypatch.setattr(pace.time, "sleep", found.append)
    return found


def work(seconds: float) -> None:
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


def always() -> bool:
    return True


def test_the_work_takes_its_share(rests: list[float]) -> None:
    began = time.thread_time()
    with beside_requests(always):
        for _ in range(10):
            work(2 * PIECE_S)
            rest()
        worked = time.thread_time() - began
    assert len(rests) == 10
    assert worked / (worked + sum(rests)) == pytest.approx(SHARE, rel=0.05)


def test_no_rest_after_less_than_a_piece(rests: list[float]) -> None:
    with beside_requests(always):
        rest()
        assert rests == []
        work(PIECE_S / 2)
        rest()
        work(PIECE_S)
        rest()
    assert len(rests) == 1
    assert rests[0] >= 1.5 * PIECE_S * (1 / SHARE - 1)  # the first half counts


def test_without_requests_it_goes_on(rests: list[float]) -> None:
    with beside_requests(lambda: False):
        work(2 * PIECE_S)
        rest()
    assert rests == []


def test_afterwards_it_goes_on(rests: list[float]) -> None:
    with beside_requests(always):
        pass
    work(2 * PIECE_S)
    rest()
    assert rests == []


def test_other_threads_do_not_rest(rests: list[float]) -> None:
    def other() -> None:
        work(2 * PIECE_S)
        rest()

    with beside_requests(always):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert rests == []


@pytest.mark.parametrize("num_entries", [100, 400])
def test_a_bundle_is_read_in_pieces(
    rests: list[float], num_entries: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No piece grows with the bundle: there is a rest for each entry, counted here whatever the machine's speed."""
    monkeypatch.setattr(pace, "PIECE_S", 0.0)
    path = tmp_path / "bundle.safetensors"
    write_bundle(random_bundle(num_entries=num_entries, seed=1), path)
    began = time.thread_time()
    with beside_requests(always):
        read_bundle(path)
    worked = time.thread_time() - began
    assert sum(rests) >= 0.8 * worked * (1 / SHARE - 1)
    assert len(rests) >= num_entries
