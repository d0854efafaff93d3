"""Dates of entries: how a bundle stores them, and answers without what has expired."""

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from inducekv_vllm.bundle import Bundle, EntryRecord, read_bundle, with_metadata, write_bundle
from inducekv_vllm.bundle.lookup import BundleIndex, QueryFeatures
from inducekv_vllm.protocol import DecideSpec, InjectionSpec, Untouched
from inducekv_vllm.workers.decisions import outcome_of
from selector.update.forget import without_entries
from tests.bundles import d, random_bundle, random_gate, random_gated_bundle

MADE = datetime(2026, 1, 1, tzinfo=UTC)
EARLY, LATE = MADE + timedelta(days=10), MADE + timedelta(days=20)


SPEC = DecideSpec("digest", True, None)


def expiring(bundle: Bundle, dates: dict[str, datetime]) -> Bundle:
    """The bundle with these dates of expiry, by entry."""
    entries = bundle.metadata.entries
    return with_metadata(bundle, entries=tuple(e.model_copy(update={"expires_at": dates.get(e.id)}) for e in entries))


def index(bundle: Bundle, tmp_path: Path) -> BundleIndex:
    write_bundle(bundle, tmp_path / "b.safetensors")
    return BundleIndex.from_bundle(read_bundle(tmp_path / "b.safetensors"))


def test_dates_come_back_and_change_the_digest(tmp_path: Path) -> None:
    record = EntryRecord(id="x", task="t", source_digest="ab", created_at=MADE, expires_at=LATE)
    bundle = random_bundle(1, entries=(record,))
    write_bundle(bundle, tmp_path / "b.safetensors")
    assert read_bundle(tmp_path / "b.safetensors").metadata.entries == (record,)
    assert (
        '"created_at":"2026-01-01T00:00:00Z","expires_at":"2026-01-21T00:00:00Z"' in bundle.metadata.model_dump_json()
    )

    dates: list[dict[str, datetime]] = [{}, {"e1": EARLY}, {"e1": LATE}, {"e2": EARLY}]
    assert len({expiring(random_bundle(), each).digest for each in dates}) == 4
    assert expiring(expiring(random_bundle(), {"e1": LATE}), {}).digest == random_bundle().digest


@pytest.mark.parametrize(
    "date",
    [
        *(0, True, [], "x" * 10000, "2026-01-01", "2026-01-01T00:00:00", "2026-01-01T00:00:00.5Z"),
        *("2026-01-01T00:00:00+02:00", "0001-01-01T00:00:00+23:59"),
    ],
)
def test_what_is_no_date(date: Any) -> None:
    bundle = expiring(random_bundle(), {"e0": LATE})
    text = bundle.metadata.model_dump_json().replace('"2026-01-21T00:00:00Z"', json.dumps(date))
    with pytest.raises(ValueError, match=r"entries\.0\.expires_at"):
        type(bundle.metadata).model_validate_json(text)


def queries(count: int = 40) -> list[QueryFeatures]:
    """Of a request to any of these memories: evidence for a gate of H = 8 too."""
    generator = torch.Generator().manual_seed(3)
    keys = torch.nn.functional.normalize(torch.randn(count, d, generator=generator), dim=-1).numpy()
    return [QueryFeatures(key, torch.rand(8, generator=generator).numpy()) for key in keys]


@pytest.mark.parametrize("top_k", [None, 2])
@pytest.mark.parametrize("plain", [random_bundle(), random_gated_bundle()], ids=["plain", "gated"])
def test_answers_are_those_after_the_expired_entries_were_forgotten(
    tmp_path: Path, plain: Bundle, top_k: int | None
) -> None:
    """Before, between and after the dates: entries, weights, and the gate's task."""
    memory = index(expiring(plain, {"e0": EARLY, "e2": LATE, "e4": LATE}), tmp_path)
    for now, gone in ((MADE, []), (EARLY, [0]), (LATE - timedelta(seconds=1), [0]), (LATE, [0, 2, 4])):
        reference = index(without_entries(plain, gone), tmp_path)
        for query in queries():
            found, expected = memory.lookup(query, top_k, now), reference.lookup(query, top_k)
            assert found.num_expired == len(gone)
            tasks = [lookup.gate_decision and lookup.gate_decision.task for lookup in (found, expected)]
            assert tasks[0] == tasks[1]
            assert (found.retrieval is None) == (expected.retrieval is None)
            if found.retrieval is not None and expected.retrieval is not None:
                ids = [memory.metadata.entries[i].id for i in found.retrieval.entries]
                assert ids == [reference.metadata.entries[i].id for i in expected.retrieval.entries]
                np.testing.assert_array_equal(found.retrieval.weights, expected.retrieval.weights)


def test_a_task_whose_entries_have_all_expired_is_closed_to(tmp_path: Path) -> None:
    weights = torch.tensor([[1.0], [2.0]]).expand(2, 8)  # every request has evidence for both, and more for b
    plain = random_gated_bundle(gate=random_gate(weights=weights, thresholds=torch.full((2,), 1e-3)))
    entries = plain.metadata.entries
    dates = {entry.id: EARLY if entry.task == "b" else LATE for entry in entries}
    memory = index(expiring(plain, dates), tmp_path)
    decisions = [memory.lookup(queries()[0], None, now).gate_decision for now in (MADE, EARLY, LATE)]
    assert [decision and decision.task for decision in decisions] == ["b", "a", None]
    assert memory.lookup(queries()[0], None, LATE).retrieval is None


def test_a_memory_without_a_gate_is_gone_with_its_last_entry(tmp_path: Path) -> None:
    memory = index(expiring(random_bundle(), {f"e{i}": EARLY for i in range(5)}), tmp_path)
    assert memory.lookup(queries()[0], None, MADE).retrieval is not None
    gone = memory.lookup(queries()[0], None, EARLY)
    assert (gone.retrieval, gone.gate_decision, gone.num_expired) == (None, None, 5)
    assert outcome_of(memory, SPEC, gone, [1, 2, 3], set()) == Untouched()


def test_the_spec_of_a_request_says_how_many_have_expired(tmp_path: Path) -> None:
    """So memory slots and prefix-cache hashes of before do not match afterwards, even for the same entries."""
    memory = index(expiring(random_bundle(), {"e0": EARLY}), tmp_path)
    query = queries()[0]
    outcomes = [outcome_of(memory, SPEC, memory.lookup(query, 1, now), [1], set()) for now in (MADE, EARLY)]
    specs = [outcome for outcome in outcomes if isinstance(outcome, InjectionSpec)]
    assert [spec.expired for spec in specs] == [0, 1]
    assert len({spec.content for spec in specs}) == 2
