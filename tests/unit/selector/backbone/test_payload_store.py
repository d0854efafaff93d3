"""The candidates' payloads on disk: the same numbers as in memory, whatever happens on the way."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from inducekv_vllm.bundle import Bundle
from inducekv_vllm.errors import ConfigError
from selector.backbone import extraction
from selector.backbone.extraction import Extraction, extract
from selector.backbone.model import Backbone
from selector.backbone.payload_store import PayloadStore
from selector.data.examples import Example
from selector.paper.candidate_pool import CandidatePool
from selector.update.build import build_bundle
from selector.update.settings import BuildSettings

M = 3


@pytest.fixture(scope="module")
def previous(llava: Backbone, examples: list[Example]) -> Bundle:
    return build_bundle(llava, examples[:2], BuildSettings(budget=4, payload_tokens=M))


def open_pool(folder: Path, backbone: Backbone, count: int, previous: Bundle | None = None, m: int = M) -> PayloadStore:
    total = count + (previous.num_entries if previous else 0)
    shape = (backbone.num_layers, total, backbone.num_kv_heads, m, backbone.head_dim)
    return PayloadStore.open(folder, shape, previous)


def in_memory(backbone: Backbone, examples: list[Example]) -> Extraction:
    return extract(backbone, examples, M, batch_size=4, payload_dtype=torch.float16)


def test_a_pool_on_disk_is_the_pool_in_memory(
    llava: Backbone, examples: list[Example], previous: Bundle, tmp_path: Path
) -> None:
    current = examples[2:]
    pool = open_pool(tmp_path / "pool", llava, len(current), previous)
    on_disk = extract(llava, current, M, batch_size=4, store=pool)
    expected = in_memory(llava, current)
    for name in ("keys", "payload_keys", "payload_values"):
        assert torch.equal(getattr(on_disk, name), getattr(expected, name))
    found, whole = (CandidatePool.join(previous, one, current) for one in (on_disk, expected))
    rows = torch.tensor([0, 1, 4, 11])
    for ours, theirs in ((found, whole), (found.take(rows), whole.take(rows))):
        assert (ours.records, ours.num_previous) == (theirs.records, theirs.num_previous)
        for name in ("keys", "payload_keys", "payload_values"):
            assert torch.equal(getattr(ours, name), getattr(theirs, name))


def test_a_finished_pool_is_not_made_again(
    llava: Backbone, examples: list[Example], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = extract(llava, examples, M, store=open_pool(tmp_path / "pool", llava, len(examples)))

    def fail(*_: Any) -> None:
        raise AssertionError("the backbone was run again")

    monkeypatch.setattr(Backbone, "hidden_states", fail)
    again = extract(llava, examples, M, store=open_pool(tmp_path / "pool", llava, len(examples)))
    assert torch.equal(again.keys, first.keys)
    assert torch.equal(again.payload_values, first.payload_values)


@pytest.mark.parametrize("damage", ["retrieval_keys-0.safetensors", "payload_values.f16", "half", "garbage"])
def test_a_pool_that_is_not_whole_is_made_again(
    llava: Backbone, examples: list[Example], tmp_path: Path, damage: str
) -> None:
    folder = tmp_path / "pool"
    expected = extract(llava, examples, M, store=open_pool(folder, llava, len(examples))).payload_values.clone()
    if damage == "half":
        os.truncate(folder / "payload_keys.f16", 100)
    elif damage == "garbage":
        (folder / "retrieval_keys-0.safetensors").write_bytes(b"not safetensors")
    else:
        (folder / damage).unlink()
    pool = open_pool(folder, llava, len(examples))
    assert len(pool.retrieval_keys()) == 0
    assert torch.equal(extract(llava, examples, M, store=pool).payload_values, expected)


def test_extraction_goes_on_after_the_last_whole_shard(
    llava: Backbone, examples: list[Example], previous: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interrupted in the third of five batches, of which two make a shard; then shards are lost."""
    monkeypatch.setattr(extraction, "SHARD", 4)
    current, run, passes = examples[2:12], Backbone.hidden_states, []

    def interrupted(self: Backbone, inputs: Any) -> torch.Tensor:
        passes.append(inputs)
        if len(passes) == 3:
            raise KeyboardInterrupt
        return run(self, inputs)

    monkeypatch.setattr(Backbone, "hidden_states", interrupted)
    with pytest.raises(KeyboardInterrupt):
        extract(llava, current, M, batch_size=2, store=open_pool(tmp_path / "pool", llava, 10, previous))
    expected = extract(llava, current, M, batch_size=2, payload_dtype=torch.float16)
    for missing, needed in (((), 3), (("retrieval_keys-8.safetensors",), 1), (("retrieval_keys-4.safetensors",), 3)):
        for name in missing:
            (tmp_path / "pool" / name).unlink()
        before = len(passes)
        found = extract(llava, current, M, batch_size=2, store=open_pool(tmp_path / "pool", llava, 10, previous))
        assert len(passes) - before == needed
        for name in ("keys", "payload_keys", "payload_values"):
            assert torch.equal(getattr(found, name), getattr(expected, name))


def test_a_disk_that_fails_on_the_way(
    llava: Backbone, examples: list[Example], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool, written = open_pool(tmp_path / "pool", llava, len(examples)), []
    write = PayloadStore._write

    def fail_late(self: PayloadStore, *arguments: Any) -> None:
        written.append(arguments)
        if len(written) == 2:
            raise OSError(28, "No space left on device")
        write(self, *arguments)

    monkeypatch.setattr(PayloadStore, "_write", fail_late)
    with pytest.raises(ConfigError, match=r"cannot keep the candidates' payloads here, .*No space left on device"):
        extract(llava, examples, M, batch_size=4, store=pool)
    assert not pool.folder.exists()
