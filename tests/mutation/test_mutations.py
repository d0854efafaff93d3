"""A mutated file is refused with an error of ours or read as what it is, in a second and 500 MB.

Every bundle is read twice: whole, and by a reader that has some of its payloads, or all. A few mutations in every run;
10,000 bundles and 2,000 task files with `make test-mutations`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from inducekv_vllm.errors import BundleError, InduceKVError, TaskDataError
from tests.mutation import bundle_files, task_files
from tests.mutation import meter as meters
from tests.mutation.bundle_files import Mutated, mutated_bundles
from tests.mutation.meter import MAX_SECONDS, Meter, Outcome, check
from tests.mutation.reading import read_bundle_file, read_task_file
from tests.mutation.task_files import MutatedTask, mutated_tasks

RARELY = 40  # one mutation of the expensive kinds for so many others


def repeatable(examples: int) -> settings:
    """The same examples in every run, however slow the machine is; a failing one is not made smaller for minutes."""
    return settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        database=None,
        phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )


def counted(few: int, many: int) -> Any:
    return pytest.mark.parametrize(
        "examples", [few, pytest.param(many, marks=[pytest.mark.slow, pytest.mark.timeout(7200)])]
    )


@pytest.fixture
def meter(request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]) -> Iterator[Meter]:
    meter = Meter()
    yield meter
    with capsys.disabled():
        print(f"\n{request.node.name}: {meter.summary()}")


@counted(200, 10_000)
def test_mutated_bundles(examples: int, meter: Meter, tmp_path: Path) -> None:
    path = tmp_path / "bundle.safetensors"
    for file in bundle_files.bundle_files().values():
        path.write_bytes(file.content())
        assert read_bundle_file(path) == file.held.read(frozenset())
        for part in (slice(None), slice(1, None), slice(-1), slice(1, None, 2)):
            known = frozenset(file.held.claimed[part])
            assert read_bundle_file(path, known=known) == file.held.read(known)

    def read(mutated: Mutated) -> None:
        mutated.write(path)
        for known in (None, mutated.known):
            outcome = meter.call(read_bundle_file, path, mutated.max_bytes, known)
            check(outcome, BundleError)
            if outcome.error is None:
                assert outcome.value == mutated.held.read(known or frozenset())

    rare = st.composite(lambda draw: bundle_files.bomb(draw))()
    repeatable(examples)(given(mutated_bundles())(lambda mutated: read(mutated)))()
    repeatable(max(3, examples // RARELY))(given(rare)(lambda mutated: read(mutated)))()
    assert len(meter.outcomes) >= 2 * examples
    assert {outcome.error is None for outcome in meter.outcomes} == {True, False}
    rows = [outcome.value["rows"] for outcome in meter.outcomes if outcome.error is None]
    assert None in rows
    assert [] in rows
    assert any(rows), "no bundle was read in part"


@counted(100, 2_000)
def test_mutated_task_files(examples: int, meter: Meter, tmp_path: Path) -> None:
    task_files.make_folder(tmp_path)
    for suffix in (".jsonl", ".json"):
        path = MutatedTask(suffix, task_files.content_of(suffix, task_files.values_of(suffix))).write(tmp_path)
        assert [(example["id"], example["digest"]) for example in read_task_file(path)] == task_files.digests(path)

    def read(mutated: MutatedTask) -> None:
        path = mutated.write(tmp_path)
        outcome = meter.call(read_task_file, path)
        check(outcome, TaskDataError)
        if outcome.error is None:
            found = [(example["id"], example["digest"]) for example in outcome.value]
            assert found == task_files.digests(path)

    rare = st.composite(lambda draw: task_files.huge(draw))()
    repeatable(examples)(given(mutated_tasks())(lambda mutated: read(mutated)))()
    repeatable(max(3, examples // RARELY))(given(rare)(lambda mutated: read(mutated)))()
    assert len(meter.outcomes) >= examples
    assert {outcome.error is None for outcome in meter.outcomes} == {True, False}


# ------------------------------------------------------------------------------------------------- the measure itself


def spend(seconds: float, size: int) -> None:
    """Computes for so long while it holds so many bytes."""
    held = bytearray(b"\1") * size
    began = time.process_time()
    while time.process_time() - began < seconds:
        pass
    del held


def test_what_takes_too_much_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meters, "MAX_BYTES", 10**8)  # taking the true limit can take more than a second
    meter = Meter()
    check(meter.call(spend, 0.0, 5 * 10**7), BundleError)
    with pytest.raises(AssertionError, match="s of CPU time"):
        check(meter.call(spend, MAX_SECONDS, 0), BundleError)
    with pytest.raises(AssertionError, match="MB"):
        check(meter.call(spend, 0.0, 12 * 10**7), BundleError)
    assert 0.49e8 < meter.outcomes[0].peak_bytes < 1e8
    assert meter.outcomes[1].seconds >= MAX_SECONDS
    with pytest.raises(MemoryError):
        meter.call(bytearray, 10**12)


def test_memory_freed_before_hides_no_peak() -> None:
    blocks = [bytearray(60_000) for _ in range(1500)]
    above = bytearray(60_000)  # what lies above freed blocks keeps them with the process
    del blocks
    assert Meter().call(spend, 0.0, 5 * 10**7).peak_bytes > 0.49e8
    del above


@pytest.mark.parametrize("error", [InduceKVError("no such class"), TaskDataError("of the other kind")])
def test_other_errors_are_noticed(error: InduceKVError) -> None:
    with pytest.raises(AssertionError, match=type(error).__name__):
        check(Outcome(None, error, 0.0, 0), BundleError)


def test_errors_that_are_not_ours_pass_through() -> None:
    with pytest.raises(ZeroDivisionError):
        Meter().call(lambda: 1 / 0)
