"""The bundle file: what is written comes back, and nothing that is wrong gets in."""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import re
import resource
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from inducekv_vllm.backbone.footprint import footprint_bytes
from inducekv_vllm.bundle import (
    MAX_HEADER_BYTES,
    METADATA_KEY,
    Bundle,
    EntryRecord,
    bundle_digest,
    read_bundle,
    write_bundle,
)
from inducekv_vllm.errors import BundleError, FingerprintMismatch
from inducekv_vllm.gate import TurnMarks
from tests.inducekv_vllm.bundles import FINGERPRINT, D, J, L, d, older, random_bundle, random_gate, random_gated_bundle

PLAIN, GATED = random_bundle(), random_gated_bundle()  # not to be changed
GATE = random_gate()
NAN, INFINITE = math.nan, math.inf


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "memory.safetensors"


def raw(bundle: Bundle) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Tensors and metadata of a bundle, to be written again with something wrong in them."""
    return bundle.tensors(), bundle.metadata.model_dump(mode="json")


def save_raw(path: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, Any]) -> None:
    safetensors.torch.save_file(tensors, path, metadata={METADATA_KEY: json.dumps(metadata)})


def resealed(bundle: Bundle, **tensors: torch.Tensor) -> Bundle:
    """The bundle with some tensors replaced, unchecked, and the digest right for them."""
    changed = replace(bundle, **tensors)
    return replace(changed, metadata=changed.metadata.model_copy(update={"digest": bundle_digest(changed)}))


def with_one(tensor: torch.Tensor, value: float) -> torch.Tensor:
    """A copy with one number in the middle replaced."""
    changed = tensor.clone()
    changed.view(-1)[changed.numel() // 2] = value
    return changed


@pytest.mark.parametrize(
    "bundle",
    [
        random_bundle(settings={"seed": 3, "grid": [0.1, 0.3], "name": 'Größe \u2028 "x"'}, adapter="lora-a"),
        random_bundle(num_entries=7, payload_tokens=8),
        random_gated_bundle(),
    ],
    ids=["metadata", "sizes", "gate"],
)
def test_round_trip_keeps_every_bit(path: Path, bundle: Bundle) -> None:
    write_bundle(bundle, path)
    again = read_bundle(path)
    assert again.metadata == bundle.metadata
    assert again.digest == bundle.digest
    for name, tensor in bundle.tensors().items():
        assert again.tensors()[name].dtype == tensor.dtype
        assert torch.equal(again.tensors()[name], tensor), name
    B, m = bundle.payload_keys.shape[1], bundle.payload_keys.shape[3]
    assert (again.num_entries, again.num_layers, again.payload_tokens) == (B, L, m)

    # The file is its header, the calibration, the gate and the footprint.
    header = int.from_bytes(path.read_bytes()[:8], "little")
    calibration = 4 + 4 * L + 4 * L
    gate = gate_size(C=2, S=2, P=4) if bundle.gate is not None else 0
    assert path.stat().st_size == 8 + header + calibration + gate + footprint_bytes(B=B, d=d, L=L, J=J, m=m, D=D)


def gate_size(C: int, S: int, P: int) -> int:
    """Bytes of a gate: prototypes in float16, the rest in float32."""
    F = J * D
    return 2 * S * P * F + 4 * (2 * S * F + S * P + C * S * P + C)


def test_same_content_gives_the_same_file(tmp_path: Path) -> None:
    write_bundle(random_bundle(seed=4), tmp_path / "a")
    write_bundle(random_bundle(seed=4), tmp_path / "b")
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_a_gate_comes_back() -> None:
    gate = random_gate(marks=TurnMarks((3, 1), 4))
    bundle = random_gated_bundle(gate=gate)
    assert bundle.metadata.format_version == 7
    assert bundle.gate is not None
    assert (bundle.gate.layers, bundle.gate.marks, bundle.gate.tasks) == (gate.layers, gate.marks, gate.tasks)
    for name, tensor in bundle.gate.tensors().items():
        dtype = torch.float16 if name == "gate_prototypes" else torch.float32
        assert torch.equal(tensor, gate.tensors()[name].to(dtype))
    assert bundle.gate.token_digest == gate.token_digest
    assert bundle.gate.record.model_dump() == {
        "layers": (0, 2),
        "prototypes": 4,
        "turn_begin": (3, 1),
        "turn_end": 4,
    }


def test_a_bundle_without_a_gate_is_as_it_was(path: Path) -> None:

    plain = older(random_bundle())
    assert plain.gate is None
    write_bundle(plain, path)
    assert plain.metadata.format_version == read_bundle(path).metadata.format_version == 1
    assert b"gate_tasks" not in path.read_bytes()
    # Computed before there were gates.
    assert plain.digest == "8fec9cca704fa88d615dcce84e3cd514b6c1b95d4da465ee61db8acaa2982595"


def _gate(name: str, tensor: torch.Tensor) -> dict[str, Any]:
    """`GATE` with another tensor in one place."""
    return {"gate": replace(GATE, **{name.removeprefix("gate_"): tensor})}


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"gate": replace(GATE, tasks=("a", "c"))}, "entry 'e2' belongs to the task 'b', which the gate does not have"),
        ({"gate": random_gate(tasks=("a", "b", "c"))}, "gate task 'c' has no entries"),
        ({"gate": replace(GATE, tasks=("a", "a"))}, "gate task 'a' occurs more than once"),
        (
            {"gate": random_gate(tasks=())},
            "a relevance gate needs tasks and what it looks at, or neither",
        ),
        *((_gate(name, with_one(tensor, NAN)), f"{name} contains NaN") for name, tensor in GATE.tensors().items()),
        ({"gate": replace(GATE, prototypes=GATE.prototypes * 1e6)}, "contains NaN or inf"),  # beyond float16
        ({"gate": replace(GATE, prototypes=GATE.prototypes * 1.01)}, "gate_prototypes must have norm 1, found 1.01"),
        (_gate("gate_scale", with_one(GATE.scale, 0.0)), "gate_scale must be above 0, found 0"),
        (_gate("gate_scale", with_one(GATE.scale, -1.0)), "gate_scale must be above 0, found -1"),
        (_gate("gate_floors", with_one(GATE.floors, -0.1)), "gate_floors must be at least 0 and below 1"),
        (_gate("gate_floors", with_one(GATE.floors, 1.0)), "gate_floors must be at least 0 and below 1"),
        (_gate("gate_thresholds", torch.tensor([0.5, 0.0])), "gate_thresholds must be above 0.*found 0"),
        (_gate("gate_thresholds", torch.tensor([-0.5, 1.0])), "gate_thresholds must be above 0.*found -0.5"),
        ({"gate": replace(GATE, layers=(2, 0))}, r"a gate looks at ascending layers below 3, found \[2, 0\]"),
        ({"gate": replace(GATE, layers=(0, 0))}, r"ascending layers below 3, found \[0, 0\]"),
        ({"gate": replace(GATE, layers=(0, 3))}, r"ascending layers below 3, found \[0, 3\]"),
        ({"gate": replace(GATE, layers=())}, "gate.layers|layers"),
        (
            {"gate": replace(GATE, thresholds=with_one(GATE.thresholds, INFINITE))},
            "gate_thresholds contains NaN or inf",
        ),
        (_gate("gate_prototypes", GATE.prototypes[:1]), r"gate_prototypes must be .*\[2, 4, 16\], found"),
        (_gate("gate_prototypes", GATE.prototypes[:, :, :8]), "gate_prototypes must be"),
        (_gate("gate_prototypes", GATE.prototypes[0]), "prototypes"),
        (_gate("gate_prototypes", GATE.prototypes[:, :3]), "gate_floors must be"),
        (_gate("gate_center", GATE.center[:1]), "gate_center must be"),
        (_gate("gate_scale", GATE.scale[:, :8]), "gate_scale must be"),
        (_gate("gate_weights", GATE.weights[:, :4]), r"gate_weights must be .*\[2, 8\], found .*\[2, 4\]"),
        (_gate("gate_thresholds", GATE.thresholds[:1]), "gate_thresholds must be"),
        ({"weighting": "sqrt"}, 'a relevance gate needs another weighting than "sqrt"'),
    ],
)
def test_gates_that_cannot_be_used(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(BundleError, match=problem):
        random_gated_bundle(**changes)


def test_gate_tensors_and_metadata_that_do_not_belong_together(path: Path) -> None:
    for tensors, bundle, problem in [
        (GATED.tensors(), PLAIN, "unknown tensors: gate_center, gate_floors"),
        (PLAIN.tensors(), GATED, "tensors are missing: gate_center, gate_floors"),
        (GATED.tensors() | {"gate_prototypes": GATE.prototypes}, GATED, "gate_prototypes must be F16"),
        (GATED.tensors() | {"gate_thresholds": GATE.thresholds[:1]}, GATED, "gate_thresholds must be F32"),
    ]:
        save_raw(path, tensors, bundle.metadata.model_dump(mode="json"))
        with pytest.raises(BundleError, match=problem):
            read_bundle(path)
    for changed in (replace(GATED, gate_floors=None), replace(PLAIN, gate_floors=GATE.floors)):
        with pytest.raises(BundleError, match="a relevance gate needs all of its tensors and at least one task"):
            write_bundle(changed, path)


def test_gates_of_earlier_versions_are_refused(path: Path) -> None:
    """They looked at the prompt's mean."""
    _, metadata = raw(random_bundle(weighting="prior"))
    tensors = PLAIN.tensors() | {"gate_keys": torch.zeros(1, 2, d).half(), "gate_thresholds": torch.zeros(1)}
    for version in (2, 6):
        save_raw(path, tensors, metadata | {"gate_tasks": ["t"], "format_version": version})
        with pytest.raises(BundleError, match=f"relevance gate is of format version {version}.* make the memory again"):
            read_bundle(path)


def test_read_bundle_does_not_depend_on_the_file(path: Path) -> None:
    write_bundle(random_bundle(), path)
    bundle = read_bundle(path)
    path.write_bytes(b"\0" * path.stat().st_size)  # in place: a memory map would show it
    assert torch.equal(bundle.payload_keys, random_bundle().payload_keys)


@pytest.mark.parametrize(
    "changes",
    [
        {"weighting": "prior"},
        {"temperature": 0.08},
        {"value_gates": torch.tensor([0.5, 0.5, 0.6])},
        {"layer_bias": torch.tensor([0.0, 0.0, 1e-3])},
        {"payload_keys": PLAIN.payload_values, "payload_values": PLAIN.payload_keys},
        {"adapter": "a"},
        {"parent_digest": "f" * 64},
        {"budget": 6},
        {"backbone": FINGERPRINT.model_copy(update={"tokenizer_digest": "1" * 64})},
        {"entries": tuple(EntryRecord(id=f"x{i}", task="t", source_digest="ab") for i in range(5))},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_every_difference_changes_the_digest(changes: dict[str, Any]) -> None:
    assert random_bundle(**changes).digest != PLAIN.digest


def test_every_part_of_a_gate_changes_the_digest() -> None:
    gates = [
        GATE,
        replace(GATE, prototypes=GATE.prototypes.flip(1)),
        *(
            _gate(name, with_one(tensor, 0.75))["gate"]
            for name, tensor in GATE.tensors().items()
            if name != "gate_prototypes"
        ),
        replace(GATE, tasks=GATE.tasks[::-1]),
        replace(GATE, layers=(0, 1)),
        replace(GATE, marks=TurnMarks((1,), None)),
        replace(GATE, marks=TurnMarks((), 1)),
        None,
    ]
    assert len({random_gated_bundle(gate=gate).digest for gate in gates}) == len(gates) == 12
    # What turns a prompt into evidence is the same behind other weights, thresholds and tasks.
    assert len({gate.token_digest for gate in gates if gate is not None}) == 8


def test_created_tensors_are_copies() -> None:
    payload = torch.randn(L, 5, J, 4, D).half()
    bundle = random_bundle(payload_keys=payload)
    before = bundle.payload_keys.clone()
    payload.zero_()
    assert torch.equal(bundle.payload_keys, before)


@pytest.mark.parametrize("gated", [False, True])
def test_every_flipped_bit_is_found(path: Path, gated: bool) -> None:
    make = random_gated_bundle if gated else partial(random_bundle, num_entries=2)
    write_bundle(make(payload_tokens=1), path)
    content = path.read_bytes()
    for position in range(0, len(content), 7):
        damaged = bytearray(content)
        damaged[position] ^= 1 << (position % 8)
        path.write_bytes(damaged)
        # No bit is without meaning: not the length, not the header, not the tensors.
        with pytest.raises(BundleError, match=re.escape(str(path))):
            read_bundle(path)


def test_every_truncation_is_found(path: Path) -> None:
    write_bundle(random_bundle(num_entries=2, payload_tokens=1), path)
    content = path.read_bytes()
    for length in [*range(64), *range(64, len(content), 101), len(content) - 1]:
        path.write_bytes(content[:length])
        with pytest.raises(BundleError, match=r"truncated|empty"):
            read_bundle(path)
    path.write_bytes(content + b"\0")
    with pytest.raises(BundleError, match="trailing bytes"):
        read_bundle(path)


def test_files_that_are_no_bundles(path: Path, tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="no such file"):
        read_bundle(path)
    with pytest.raises(BundleError, match="not a regular file"):
        read_bundle(tmp_path)
    for content, problem in [
        (b"", "the file is empty"),
        (b"{}", "truncated"),
        (b"not a safetensors file, but long enough to have a length", "the header is longer than 6291456 bytes"),
        ((5).to_bytes(8, "little") + b"hello", "not JSON"),
        ((2).to_bytes(8, "little") + b"[]", "not a JSON object"),
        ((2).to_bytes(8, "little") + b"{}", "not a memory bundle"),
        ((20000).to_bytes(8, "little") + b"[" * 20000, "not JSON"),
    ]:
        path.write_bytes(content)
        with pytest.raises(BundleError, match=problem) as error:
            read_bundle(path)
        assert str(path) in str(error.value)


def test_oversized_header_is_refused_before_it_is_read(path: Path) -> None:
    with path.open("wb") as file:
        file.write((2**40).to_bytes(8, "little"))
        file.truncate(2**41)  # sparse: reading it would be noticed
    with pytest.raises(BundleError, match="longer than 6291456"):
        read_bundle(path)


@pytest.fixture
def only_header(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading what is behind the header fails."""

    def load(data: bytes) -> None:
        raise AssertionError("the tensors were read")

    monkeypatch.setattr(safetensors.torch, "load", load)


@pytest.mark.usefixtures("only_header")
def test_the_header_decides_before_anything_else_is_read(path: Path) -> None:
    write_bundle(PLAIN, path)
    served = FINGERPRINT.model_copy(update={"num_layers": 9})
    with pytest.raises(FingerprintMismatch, match=r"^here was made for another backbone: num_layers: 3, the model has"):
        read_bundle(path, backbone=served, name="here")
    with pytest.raises(BundleError, match=f"has {path.stat().st_size} bytes, more than the limit of 100"):
        read_bundle(path, max_bytes=100)


@pytest.mark.usefixtures("only_header")
def test_a_sparse_file_is_refused_by_its_size(path: Path) -> None:
    tensors, good = raw(PLAIN)
    save_raw(path, tensors, good)
    os.truncate(path, 8 * 10**12)
    with pytest.raises(BundleError, match=r"trailing bytes: expected .* found 8000000000000"):
        read_bundle(path)


def test_names_that_are_no_files(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name, problem in [
        ("x" * 300, "File name too long"),
        ("a\0b", "not the name of a file"),
        ("a\ud800b", "not the name of a file"),
        ("pipe", "not a regular file"),
    ]:
        with pytest.raises(BundleError, match=problem):
            read_bundle(tmp_path / name)


@pytest.mark.parametrize("gated", [False, True])
def test_many_entries_are_checked_in_linear_time(path: Path, gated: bool) -> None:
    """10,000 entries with both dates, nearly the most that a header holds: tasks of their own, or adapters for half."""
    _, good = raw(PLAIN)
    numbers = range(10_000)
    tasks = [f"t{i}" for i in numbers]
    half = len(numbers) // 2
    dates = {"created_at": "2026-01-02T00:00:00Z", "expires_at": "2027-01-02T00:00:00Z"}
    many = good | {
        "budget": len(numbers),
        "entries": [{"id": f"e{i}", "task": tasks[i], "source_digest": "a", **dates} for i in numbers],
    }
    if gated:
        many |= {"form": "decoupled", "weighting": "uniform", "gate_tasks": tasks, "format_version": 7}
        many |= {"gate": GATE.record.model_dump(mode="json")}
        many |= {"entries": many["entries"][:half], "activations": dict.fromkeys(tasks[:half], "text")}
        records = [{"task": task, "path": "p", "digest": task, "rank": 1} for task in tasks[half:]]
        many |= {"task_adapters": records}
    many |= {"payload_digests": ["0" * 64] * len(many["entries"])}
    save_raw(path, {"retrieval_keys": torch.zeros(1)}, many)
    began = time.process_time()
    with pytest.raises(BundleError, match="tensors are missing"):
        read_bundle(path)
    assert time.process_time() - began < 1


def test_a_header_that_is_too_long_to_be_read_is_not_written(path: Path) -> None:
    with pytest.raises(BundleError, match="the metadata is too large: a header of"):
        write_bundle(random_bundle(settings={"x": "x" * MAX_HEADER_BYTES}), path)
    assert not path.exists()


def test_what_a_message_quotes_can_be_printed(path: Path) -> None:
    for name in ("a\0b", "\x1b[2J", "x" * 70_000):
        text = json.dumps(
            {"__metadata__": {METADATA_KEY: PLAIN.metadata.model_dump_json()}, name: {}}
            | dict.fromkeys(PLAIN.tensors(), 0)
        )
        path.write_bytes(len(text).to_bytes(8, "little") + text.encode())
        with pytest.raises(BundleError, match="unknown tensors") as error:
            read_bundle(path)
        assert str(error.value).isprintable()
        assert len(str(error.value)) <= 2000


def test_random_damage_is_a_bundle_error_or_nothing(path: Path) -> None:
    """Bytes replaced, removed, doubled, numbers and strings made absurd: our own error, or the same bundle."""
    write_bundle(GATED, path)
    content = path.read_bytes()
    rng = random.Random(0)
    absurd = [b"9" * 5000, b"-1", b"1e999", b"NaN", b'"\\ud800"', b"[" * 600 + b"]" * 600, b"null", b"{}", b'"\\u0000"']
    for _ in range(300):
        damaged, start = bytearray(content), rng.randrange(len(content) - 2000 if rng.random() < 0.3 else 1500)
        kind, length = rng.randrange(4), rng.randrange(1, 40)
        if kind == 0:
            damaged[start : start + length] = rng.randbytes(length)
        elif kind == 1:
            del damaged[start : start + length]
        elif kind == 2:
            damaged[start:start] = damaged[start : start + length]
        else:
            numbers = [m.span() for m in re.finditer(rb"(?<=:)(\d+|\\*\"\w*\\*\")", bytes(damaged[:3000]))]
            first, last = rng.choice(numbers)
            damaged[first:last] = rng.choice(absurd)
            header = damaged.rindex(b"}", 0, 6000) - 7
            damaged[:8] = header.to_bytes(8, "little")
        path.write_bytes(damaged)
        with contextlib.suppress(BundleError):
            assert read_bundle(path).digest == GATED.digest


def test_metadata_that_cannot_be_used(path: Path) -> None:
    tensors, good = raw(older(random_bundle()))
    for change, problem in [
        ({"format_version": 8}, "format version 8 is not supported, expected one of 1, 2, 3, 4, 5, 6, 7"),
        ({"format_version": 7}, "with 0 gate_tasks and no map is format version 1, found 7"),
        ({"format_version": 6}, "with 0 gate_tasks and no map is format version 1, found 6"),
        ({"payload_digests": ["0" * 64] * 5}, "no map, with digests of payloads, is format version 6, found 1"),
        ({"payload_digests": ["0" * 64] * 4}, "expected a payload digest for each of 5 entries, found 4"),
        ({"payload_digests": ["x" * 64] * 5}, "payload_digests.0"),
        ({"format_version": 2}, "with 0 gate_tasks and no map is format version 1, found 2"),
        ({"gate_tasks": ["t"]}, "its relevance gate is of format version 1"),
        ({"gate": GATE.record.model_dump()}, "a relevance gate needs tasks and what it looks at, or neither"),
        ({"format_version": None}, "format version None"),
        ({"weighting": "cube"}, "weighting"),
        ({"budget": 4}, "5 entries exceed the budget of 4"),
        ({"budget": 0}, "budget"),
        ({"entries": []}, "entries"),
        ({"entries": [good["entries"][0]] * 5}, "'e0' occurs more than once"),
        ({"entries": [{**good["entries"][0], "id": "x" * 257}]}, "entries.0.id: String should have at most 256 char"),
        ({"entries": good["entries"][:4]}, "retrieval_keys must be F16 [4, 16], found F16 [5, 16]"),
        ({"payload_tokens": 8}, "payload_keys must be F16 [3, 5, 2, 8, 8]"),
        ({"surprise": 1}, "surprise"),
        ({"backbone": good["backbone"] | {"num_layers": 10**30}}, "metadata: backbone.num_layers"),
        ({"payload_tokens": 10**4000}, "metadata: payload_tokens"),
    ]:
        save_raw(path, tensors, good | change)
        with pytest.raises(BundleError) as error:
            read_bundle(path)
        assert problem in str(error.value)
        assert str(path) in str(error.value)
    safetensors.torch.save_file(tensors, path, metadata={METADATA_KEY: "{no json"})
    with pytest.raises(BundleError, match="not JSON"):
        read_bundle(path)
    del good["format_version"]
    for text in ("[1]", json.dumps(good)):
        safetensors.torch.save_file(tensors, path, metadata={METADATA_KEY: text})
        with pytest.raises(BundleError, match="format version None"):
            read_bundle(path)


def test_a_lone_surrogate_in_the_metadata_is_refused(path: Path) -> None:
    """The JSON of the header can escape one."""
    write_bundle(random_bundle(recipe="abcdef"), path)
    content = path.read_bytes()
    assert content.count(b"abcdef") == 1
    path.write_bytes(content.replace(b"abcdef", rb"\ud800"))
    with pytest.raises(BundleError, match="header is not JSON"):
        read_bundle(path)


def test_tensors_that_cannot_be_used(path: Path) -> None:
    good, metadata = raw(random_bundle())
    cases: list[tuple[dict[str, torch.Tensor], str]] = [
        ({k: v for k, v in good.items() if k != "layer_bias"}, "tensors are missing: layer_bias"),
        (good | {"extra": torch.zeros(1)}, "unknown tensors: extra"),
        (good | {"payload_keys": good["payload_keys"].float()}, "payload_keys must be F16"),
        (good | {"temperature": good["temperature"][None]}, r"temperature must be F32 \[\], found F32 \[1\]"),
        (good | {"value_gates": torch.full((L + 1,), 0.5)}, "value_gates must be F32"),
        (good | {"payload_values": good["payload_values"][:, :, :1].contiguous()}, "payload_values must be F16"),
    ]
    for tensors, problem in cases:
        save_raw(path, tensors, metadata)
        for verify in (True, False):
            with pytest.raises(BundleError, match=problem):
                read_bundle(path, verify=verify)


@pytest.mark.parametrize(
    ("tensors", "problem"),
    [
        ({"payload_keys": with_one(PLAIN.payload_keys, NAN)}, "NaN or infinite"),
        ({"payload_values": with_one(PLAIN.payload_values, -INFINITE)}, "NaN or infinite"),
        ({"retrieval_keys": with_one(PLAIN.retrieval_keys, NAN)}, "NaN or infinite"),
        ({"retrieval_keys": PLAIN.retrieval_keys * 1.01}, "must have norm 1, found 1.01"),
        ({"retrieval_keys": PLAIN.retrieval_keys * torch.eye(5)[0][:, None].half()}, "norm 1, found 0"),
        ({"temperature": torch.tensor(0.0)}, "temperature must be above 0"),
        ({"temperature": torch.tensor(-0.1)}, "temperature must be above 0"),
        ({"temperature": torch.tensor(NAN)}, "NaN or infinite"),
        ({"value_gates": torch.tensor([0.5, 0.0, 0.5])}, "value_gates must be above 0"),
        ({"value_gates": torch.tensor([0.5, 1.1, 0.5])}, "at most 1"),
        ({"layer_bias": torch.tensor([0.0, -INFINITE, 0.0])}, "NaN or infinite"),
    ],
)
def test_values_that_cannot_be_used(tensors: dict[str, torch.Tensor], problem: str, path: Path) -> None:
    bundle = resealed(PLAIN, **tensors)
    with pytest.raises(BundleError, match=problem):
        write_bundle(bundle, path)
    assert not path.exists()
    save_raw(path, *raw(bundle))
    with pytest.raises(BundleError, match=problem) as error:
        read_bundle(path)
    assert str(path) in str(error.value)


def test_create_refuses_what_the_file_could_not_hold() -> None:
    with pytest.raises(BundleError, match="payload_values contains NaN or infinite"):
        random_bundle(payload_values=torch.full((L, 5, J, 4, D), 1e6))  # beyond float16
    with pytest.raises(BundleError, match="settings must be JSON values"):
        random_bundle(settings={"rate": NAN})
    with pytest.raises(BundleError, match="5 entries exceed the budget of 4"):
        random_bundle(budget=4)
    with pytest.raises(BundleError, match=r"payload_values must be .*\[3, 5, 2, 3, 8\], found"):
        random_bundle(payload_keys=torch.zeros(L, 5, J, 3, D))


@pytest.mark.parametrize("make", [random_bundle, random_gated_bundle])
def test_the_safetensors_library_reads_what_is_written(path: Path, make: Callable[..., Bundle]) -> None:
    """And writes the same file, but for the order of what has the same size."""
    bundle = make()
    write_bundle(bundle, path)
    with safetensors.safe_open(path, "pt") as file:
        assert file.metadata() == {METADATA_KEY: bundle.metadata.model_dump_json()}
        read = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  it is no dictionary
    assert read.keys() == bundle.tensors().keys()
    assert all(torch.equal(read[name], tensor) for name, tensor in bundle.tensors().items())
    size = path.stat().st_size
    safetensors.torch.save_file(bundle.tensors(), path, metadata={METADATA_KEY: bundle.metadata.model_dump_json()})
    assert path.stat().st_size == size
    assert read_bundle(path).digest == bundle.digest


def test_a_stale_digest_is_not_written(path: Path) -> None:
    bundle = random_bundle()
    bundle.payload_keys[0, 0, 0, 0, 0] += 1
    with pytest.raises(BundleError, match="does not match its digest"):
        write_bundle(bundle, path)
    assert not path.exists()


def test_what_was_checked_is_written_without_another_check_of_values(path: Path) -> None:
    bundle = replace(random_bundle(), temperature=torch.tensor(0.5))  # its digest is stale
    write_bundle(bundle, path, verify=False)
    with pytest.raises(BundleError, match="does not match its digest"):
        read_bundle(path)
    misshapen = replace(bundle, layer_bias=torch.zeros(7))
    with pytest.raises(BundleError, match="layer_bias must be"):
        write_bundle(misshapen, path.with_name("other"), verify=False)


def test_writing_replaces_the_old_file_whole(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_bundle(random_bundle(seed=1), path)
    before = path.read_bytes()

    def fail(*arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(BundleError, match="No space left"):
        write_bundle(random_bundle(seed=2), path)
    assert path.read_bytes() == before
    assert os.listdir(path.parent) == [path.name]

    monkeypatch.undo()
    write_bundle(random_bundle(seed=2), path)
    assert read_bundle(path).digest == random_bundle(seed=2).digest
    assert os.listdir(path.parent) == [path.name]


def test_a_full_disk_leaves_nothing_behind(path: Path) -> None:
    """A file-size limit makes the write itself fail half way, as a full disk does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20000, hard))
    try:
        with pytest.raises(BundleError, match=re.escape(str(path))):
            write_bundle(random_bundle(num_entries=64, payload_tokens=8), path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert os.listdir(path.parent) == []


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="nowhere"):
        write_bundle(random_bundle(), tmp_path / "nowhere" / "m.safetensors")


def test_an_interruption_leaves_nothing_behind(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(descriptor: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_bundle(random_bundle(), path)
    assert os.listdir(path.parent) == []


def test_another_backbone_is_refused_with_every_difference() -> None:
    bundle = random_bundle()
    bundle.require_backbone(FINGERPRINT)
    served = FINGERPRINT.model_copy(update={"num_layers": 9, "tokenizer_digest": "1" * 64})
    with pytest.raises(FingerprintMismatch, match=r"num_layers: 3, the model has 9; tokenizer_digest"):
        bundle.require_backbone(served, "memory")
    assert FINGERPRINT.differences(FINGERPRINT) == []
