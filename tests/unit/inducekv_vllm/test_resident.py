"""Bundles that load in the background: what is known while they do, and what is left when they fail or are dropped."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from inducekv_vllm.attention.ranges import Ranges, Region
from inducekv_vllm.errors import BundleError, CapacityError
from inducekv_vllm.pace import rest
from inducekv_vllm.workers import resident
from inducekv_vllm.workers.resident import ResidentBundles
from inducekv_vllm.workers.steps import Steps


class Host(SimpleNamespace):
    """A bundle in host memory."""


class Loader:
    """Loads that wait until they are let go; paths named "bad" fail."""

    def __init__(self) -> None:
        self.ranges = Ranges(4, self.erase)
        self.let_go, self.begun = threading.Event(), threading.Event()
        self.may_erase = threading.Event()
        self.may_erase.set()
        self.threads: list[str] = []
        self.erased: list[tuple[str, range]] = []  # thread and place

    def erase(self, place: range) -> None:
        assert self.may_erase.wait(30)
        self.erased.append((threading.current_thread().name, place))

    def load(self, path: str, digest: str) -> Any:
        self.threads.append(threading.current_thread().name)
        self.begun.set()
        assert self.let_go.wait(30)
        if path == "bad":
            raise BundleError("bad: no such file")
        return Host(digest=digest, nbytes=10)

    def store(self, host: Any) -> Any:
        return SimpleNamespace(digest=host.digest, host=host, region=self.ranges.allocate(2))


@pytest.fixture
def loader() -> Loader:
    return Loader()


@pytest.fixture
def bundles(loader: Loader) -> Iterator[ResidentBundles]:
    bundles = ResidentBundles(loader.load, loader.store, Steps(), host_bytes=25)
    yield bundles
    loader.may_erase.set()
    loader.let_go.set()
    bundles.close()


def wait(bundles: ResidentBundles, digest: str) -> Any:
    return bundles._bundles[digest].exception(30) or bundles[digest]


def settle(bundles: ResidentBundles) -> None:
    """Wait for what the thread has begun."""
    bundles._thread.submit(lambda: None).result(30)


def test_a_content_is_loaded_once_while_the_worker_goes_on(bundles: ResidentBundles, loader: Loader) -> None:
    bundles.begin("a", "A")
    assert loader.begun.wait(30)
    assert bundles.outcome("A") is None
    assert "A" not in bundles
    bundles.begin("a", "A")
    loader.let_go.set()
    assert wait(bundles, "A").digest == "A"
    bundles.begin("a", "A")
    assert bundles.outcome("A") is bundles["A"]
    assert bundles.loaded.keys() == {"A"}
    assert len(loader.threads) == 1
    assert threading.current_thread().name not in loader.threads


def test_a_failure_is_reported_until_the_next_attempt_and_leaves_nothing(
    bundles: ResidentBundles, loader: Loader
) -> None:
    loader.let_go.set()
    bundles.begin("bad", "A")
    wait(bundles, "A")
    for _ in range(2):  # ranks that are slower are asked again, and so is this one
        assert str(bundles.outcome("A")) == "bad: no such file"
    assert "A" not in bundles
    failed = weakref.ref(bundles._bundles["A"])  # its error holds what had been read
    assert bundles.unload("A")
    settle(bundles)
    assert bundles.is_erased("A")
    gc.collect()
    assert failed() is None
    bundles.begin("good", "A")
    assert wait(bundles, "A").digest == "A"


def test_an_unload_also_ends_a_running_load(bundles: ResidentBundles, loader: Loader) -> None:
    bundles.begin("a", "A")
    assert loader.begun.wait(30)
    bundles.begin("b", "B")  # it waits for the first one, and never runs
    assert bundles.unload("A")
    assert bundles.unload("B")
    assert not bundles.unload("A")
    loader.let_go.set()
    bundles.begin("c", "C")
    wait(bundles, "C")  # after the first one has ended
    assert loader.ranges.num_free == 2
    assert len(loader.threads) == 2
    assert bundles.unload("C")
    bundles.begin("d", "D")
    wait(bundles, "D")  # after C is erased
    assert loader.ranges.num_free == 2
    assert all(bundles.is_erased(digest) for digest in "ABC")


def test_a_bundle_is_erased_when_each_of_its_copies_is(bundles: ResidentBundles, loader: Loader) -> None:
    """It was loaded again, and unloaded again, while a request still read the first copy."""
    loader.let_go.set()
    bundles.begin("a", "A")
    first = wait(bundles, "A")
    first.region.retain()
    bundles.unload("A")
    bundles.begin("a", "A")
    wait(bundles, "A")
    bundles.unload("A")
    settle(bundles)
    assert not bundles.is_erased("A")
    first.region.release()
    assert bundles.is_erased("A")


def held_by_a_request(bundles: ResidentBundles, loader: Loader) -> Region:
    """A bundle A that is unloaded while a request has it."""
    loader.let_go.set()
    bundles.begin("a", "A")
    region: Region = wait(bundles, "A").region
    region.retain()
    bundles.unload("A")
    settle(bundles)
    return region


def test_the_request_that_ends_last_does_not_wait_for_the_erasure(bundles: ResidentBundles, loader: Loader) -> None:
    region = held_by_a_request(bundles, loader)
    loader.may_erase.clear()
    bundles.release(region)  # would wait for 30 s
    assert loader.erased == []
    assert not bundles.is_erased("A")
    assert loader.ranges.num_free == 2
    loader.may_erase.set()
    settle(bundles)
    assert bundles.is_erased("A")
    assert loader.ranges.num_free == 4
    ((thread, place),) = loader.erased
    assert place == range(2)
    assert thread == loader.threads[0] != threading.current_thread().name


def test_what_is_to_be_erased_is_erased_before_later_loads_and_before_the_end(
    bundles: ResidentBundles, loader: Loader
) -> None:
    region = held_by_a_request(bundles, loader)
    bundles.begin("b", "B")
    wait(bundles, "B")
    loader.let_go.clear()
    loader.begun.clear()
    bundles.unload("B")
    bundles.begin("c", "C")
    assert loader.begun.wait(30)
    bundles.begin("d", "D")  # C and D take all four places
    bundles.release(region)
    loader.let_go.set()
    assert wait(bundles, "D").digest == "D"  # it had the room of what was released behind it
    loader.let_go.clear()
    loader.begun.clear()
    bundles.begin("e", "E")  # it fails for want of room
    assert loader.begun.wait(30)
    bundles.begin("never", "F")
    bundles.unload("C")
    bundles.unload("D")
    threading.Timer(0.05, loader.let_go.set).start()
    bundles.close()
    assert loader.ranges.num_free == 4
    assert len(loader.threads) == 5  # F was never begun


def test_loads_and_erasures_wait_for_the_end_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inducekv_vllm.workers.steps.LONGEST_REST_S", 30)
    steps, done = Steps(), list[str]()
    ranges = Ranges(8, lambda place: (rest(), done.append("erased")))

    def load(path: str, digest: str) -> Any:
        rest()
        done.append("loaded")
        return SimpleNamespace(nbytes=1)

    def store(host: Any) -> Any:
        return SimpleNamespace(region=ranges.allocate(2))

    bundles = ResidentBundles(load, store, steps)
    for change in (lambda: bundles.begin("a", "A"), lambda: bundles.unload("A")):
        before = list(done)
        steps.begin()
        change()
        time.sleep(0.05)
        assert done == before
        steps.end()
        settle(bundles)
    bundles.close()
    assert done == ["loaded", "erased"]


def load(bundles: ResidentBundles, digest: str) -> Any:
    bundles.begin("path", digest)
    return wait(bundles, digest)


@pytest.mark.parametrize(("is_busy", "is_copied"), [(True, True), (True, False), (False, False)])
def test_a_step_waits_as_long_as_it_may_and_only_for_a_copy(
    loader: Loader, is_busy: bool, is_copied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []
    monkeypatch.setattr(resident, "wait", lambda futures, seconds: waits.append(seconds))
    steps: Any = SimpleNamespace(follow=is_busy, patience=0.25, go_first=lambda: 0.0)
    bundles = ResidentBundles(loader.load, loader.store, steps, host_bytes=25)
    loader.let_go.set()
    if is_copied:
        load(bundles, "A")
        bundles.unload("A", keep=True)
        settle(bundles)
    waits.clear()
    assert load(bundles, "A").digest == "A"
    assert waits == ([0.25] if is_copied or not is_busy else [])
    bundles.close()


def test_what_comes_back_from_host_memory_is_not_read_again(bundles: ResidentBundles, loader: Loader) -> None:
    loader.let_go.set()
    first = load(bundles, "A")
    bundles.unload("A", keep=True)
    settle(bundles)
    assert bundles.is_erased("A")
    assert loader.ranges.num_free == 4
    assert load(bundles, "A").host is first.host
    assert len(loader.threads) == 1


def test_host_memory_keeps_what_was_loaded_last_within_its_size(bundles: ResidentBundles, loader: Loader) -> None:
    loader.let_go.set()
    for digest in "ABAC":  # two of the three fit
        load(bundles, digest)
        bundles.unload(digest, keep=True)
    settle(bundles)
    assert bundles.host_bytes == 20
    reads = len(loader.threads)
    load(bundles, "A")
    assert len(loader.threads) == reads == 3
    bundles.unload("A", keep=True)
    load(bundles, "B")
    assert len(loader.threads) == reads + 1


@pytest.mark.parametrize("is_resident", [True, False])
def test_what_is_erased_is_gone_from_host_memory(bundles: ResidentBundles, loader: Loader, is_resident: bool) -> None:
    loader.let_go.set()
    copy = weakref.ref(load(bundles, "A").host)
    if not is_resident:
        bundles.unload("A", keep=True)
    bundles.unload("A")
    settle(bundles)
    assert bundles.is_erased("A")
    assert bundles.host_bytes == 0
    gc.collect()
    assert copy() is None
    load(bundles, "A")
    assert len(loader.threads) == 2


def test_a_load_that_an_erasure_overtakes_leaves_nothing_in_host_memory(
    bundles: ResidentBundles, loader: Loader
) -> None:
    bundles.begin("path", "A")
    assert loader.begun.wait(30)
    bundles.unload("A", keep=True)
    bundles.unload("A")
    assert not bundles.is_erased("A")
    loader.let_go.set()
    settle(bundles)
    assert bundles.is_erased("A")
    assert bundles.host_bytes == 0


def test_what_has_no_room_in_the_pool_is_read_once(bundles: ResidentBundles, loader: Loader) -> None:
    loader.let_go.set()
    for digest in "ABC":
        load(bundles, digest)
    assert isinstance(bundles.outcome("C"), CapacityError)
    bundles.unload("C", keep=True)
    bundles.unload("A", keep=True)
    assert load(bundles, "C").digest == "C"
    assert len(loader.threads) == 3


def test_the_outcome_of_a_load_that_was_given_up_is_an_error_and_ends_nobody(bundles: ResidentBundles) -> None:
    """One that is out of time is unloaded, while whoever waits for it asks once more."""
    assert isinstance(bundles.outcome("gone"), BundleError)
