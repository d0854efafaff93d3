"""The bundle file: what is written comes back, and nothing that is wrong gets in."""

import gc
import json
import math
import os
import re
import resource
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from inducekv_vllm.backbone.footprint import footprint_bytes
from inducekv_vllm.bundle import (
    FORMAT_VERSION,
    MAX_HEADER_BYTES,
    METADATA_KEY,
    Bundle,
    EntryRecord,
    FactRecord,
    bundle_digest,
    bundle_without_entries,
    file,
    read_bundle,
    sign_digest,
    with_metadata,
    write_bundle,
)
from inducekv_vllm.errors import BundleError, FingerprintMismatch
from inducekv_vllm.gate import TurnMarks
from tests.bundles import (
    FINGERPRINT,
    D,
    J,
    L,
    d,
    in_layers,
    random_bundle,
    random_gate,
    random_gated_bundle,
    random_maps,
    remade,
)

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


def with_one(tensor: torch.Tensor, value: float) -> torch.Tensor:
    """A copy with one number in the middle replaced."""
    changed = tensor.clone()
    changed.view(-1)[changed.numel() // 2] = value
    return changed


# ---- what comes back ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "bundle",
    [
        random_bundle(settings={"seed": 3, "grid": [0.1, 0.3], "name": 'Größe \u2028 "x"'}),
        random_bundle(num_entries=7, payload_tokens=8),
        random_gated_bundle(gate=random_gate(marks=TurnMarks((3, 1), 4))),
    ],
    ids=["metadata", "sizes", "gate"],
)
def test_round_trip_keeps_every_bit(path: Path, bundle: Bundle) -> None:
    write_bundle(bundle, path)
    again = read_bundle(path)
    assert again.metadata == bundle.metadata
    assert again.metadata.format_version == FORMAT_VERSION == 2
    with safetensors.safe_open(path, "pt") as opened:
        library = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118  it is no dictionary
    assert library.keys() == again.tensors().keys() == bundle.tensors().keys()
    for name, tensor in bundle.tensors().items():
        for found in (library[name], again.tensors()[name]):
            assert found.dtype == tensor.dtype
            assert torch.equal(found, tensor), name
    B, m = bundle.payload_keys.shape[1], bundle.payload_keys.shape[3]
    assert (again.num_entries, again.num_layers, again.payload_tokens) == (B, L, m)

    # The file is its header, the calibration, the gate and the footprint.
    header = int.from_bytes(path.read_bytes()[:8], "little")
    calibration = 4 + 4 * L + 4 * L
    gate = gate_size(C=2, S=2, P=4) if bundle.gate is not None else 0
    assert path.stat().st_size == 8 + header + calibration + gate + footprint_bytes(B=B, d=d, L=L, J=J, m=m, D=D)

    path.write_bytes(b"\0" * path.stat().st_size)  # in place: a memory map would show it
    assert torch.equal(again.payload_keys, bundle.payload_keys)


def test_values_of_another_size_than_keys(path: Path) -> None:
    """Latents (MLA)."""
    assert PLAIN.metadata.backbone.num_features == J * D
    backbone = FINGERPRINT.model_copy(update={"value_dim": D - 2})
    gate = random_gate(backbone)
    bundle = random_gated_bundle(
        backbone=backbone, payload_values=PLAIN.payload_values[..., :-2], gate=gate, form="decoupled",
        weighting="uniform", activations=dict.fromkeys("ab", "prompt"),
    )  # fmt: skip
    write_bundle(bundle, path)
    again = read_bundle(path, backbone=backbone)
    assert again.metadata == bundle.metadata
    assert torch.equal(again.payload_values, bundle.payload_values)
    with pytest.raises(FingerprintMismatch, match=f"value_dim: {D - 2}, the model has None"):
        read_bundle(path, backbone=FINGERPRINT)
    with pytest.raises(BundleError, match=r"payload_values must be torch.float16 \[.*6\], found .*8\]"):
        random_bundle(backbone=backbone)
    with pytest.raises(BundleError, match=r"a memory of latents \(MLA\) has no maps of the attention output"):
        remade(bundle, **random_maps(bundle.payload_keys.shape, 2, 2))
    empty = bundle_without_entries(
        backbone, recipe="refined", settings={},
        facts=(FactRecord(id="f", task="t", source_digest="ab", question="q", answer="a"),),
    )  # fmt: skip
    assert empty.payload_values.shape[-1] == D - 2


def test_memory_in_some_layers(path: Path) -> None:
    """A file of memory in all layers is as it was before there was a choice."""
    whole = random_bundle(form="decoupled", weighting="uniform", activations={"t": "prompt"})
    assert "layers" not in raw(whole)[1]
    bundle = in_layers(whole, (0, 2))
    assert (bundle.num_layers, bundle.metadata.layers) == (2, (0, 2))
    assert torch.equal(bundle.payload_keys, whole.payload_keys[[0, 2]])
    write_bundle(bundle, path)
    again = read_bundle(path)
    assert again.metadata == bundle.metadata
    assert torch.equal(again.payload_values, bundle.payload_values)
    assert in_layers(whole, (0, 1)).digest != remade(bundle, layers=(0, 1)).digest != bundle.digest
    for layers in ((2, 0), (0, 0), (0, 3)):
        with pytest.raises(BundleError, match=rf"memory is in ascending layers below 3, found \[{layers[0]}"):
            remade(bundle, layers=layers)
    with pytest.raises(BundleError, match=r"payload_keys must be .* \[1, 5, 2, 4, 8\], found"):
        remade(bundle, layers=(1,))
    with pytest.raises(BundleError, match="memory in some layers alone needs the decoupled form, found 'merged'"):
        remade(PLAIN, layers=(0, 1, 2))


def gate_size(C: int, S: int, P: int) -> int:
    """Bytes of a gate: prototypes in float16, the rest in float32."""
    F = J * D
    return 2 * S * P * F + 4 * (2 * S * F + S * P + C * S * P + C)


def test_same_content_gives_the_same_file(tmp_path: Path) -> None:
    signature = sign_digest(random_gated_bundle(seed=4).digest, Ed25519PrivateKey.from_private_bytes(bytes(32)))
    contents = set()
    for number in range(8):
        write_bundle(replace(random_gated_bundle(seed=4), signature=signature), tmp_path / str(number))
        contents.add((tmp_path / str(number)).read_bytes())
        assert (tmp_path / str(number)).stat().st_mode & 0o600 == 0o600
    assert len(contents) == 1


def test_created_tensors_are_copies() -> None:
    payload = torch.randn(L, 5, J, 4, D).half()
    bundle = random_bundle(payload_keys=payload)
    before = bundle.payload_keys.clone()
    payload.zero_()
    assert torch.equal(bundle.payload_keys, before)


@pytest.mark.parametrize(
    "changes",
    [
        {"weighting": "prior"},
        {"temperature": 0.08},
        {"value_gates": torch.tensor([0.5, 0.5, 0.6])},
        {"layer_bias": torch.tensor([0.0, 0.0, 1e-3])},
        {"payload_keys": PLAIN.payload_values, "payload_values": PLAIN.payload_keys},
        {"payload_values": with_one(PLAIN.payload_values, 0.25)},
        {"parent_digest": "f" * 64},
        {"budget": 6},
        {"backbone": FINGERPRINT.model_copy(update={"tokenizer_digest": "1" * 64})},
        {"entries": tuple(EntryRecord(id=f"x{i}", task="t", source_digest="ab") for i in range(5))},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_every_difference_changes_the_digest(changes: dict[str, Any]) -> None:
    assert random_bundle(**changes).digest != PLAIN.digest


def _gate(name: str, tensor: torch.Tensor) -> dict[str, Any]:
    """`GATE` with another tensor in one place."""
    return {"gate": replace(GATE, **{name.removeprefix("gate_"): tensor})}


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
        replace(GATE, near=(-1.0, 0.0)),
        None,
    ]
    assert len({random_gated_bundle(gate=gate).digest for gate in gates}) == len(gates) == 13


# ---- damage ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bundle", [random_bundle(2, 1), random_gated_bundle(payload_tokens=1)], ids=["plain", "gate"])
def test_every_flipped_bit_and_every_truncation_is_found(path: Path, bundle: Bundle) -> None:
    """No bit is without meaning: not the length, not the header, not the tensors."""
    write_bundle(bundle, path)
    content = path.read_bytes()
    for position in range(0, len(content), 7):
        damaged = bytearray(content)
        damaged[position] ^= 1 << (position % 8)
        path.write_bytes(damaged)
        with pytest.raises(BundleError, match=re.escape(str(path))):
            read_bundle(path)
    for length in [*range(64), *range(64, len(content), 101), len(content) - 1]:
        path.write_bytes(content[:length])
        with pytest.raises(BundleError, match=r"truncated|empty"):
            read_bundle(path)
    path.write_bytes(content + b"\0")
    with pytest.raises(BundleError, match="trailing bytes"):
        read_bundle(path)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "the file is empty"),
        (b"{}", "truncated"),
        (b"not a safetensors file, but long enough to have a length", "the header is longer than 25165824 bytes"),
        ((5).to_bytes(8, "little") + b"hello", "not JSON"),
        ((2).to_bytes(8, "little") + b"[]", "not a JSON object"),
        ((2).to_bytes(8, "little") + b"{}", "not a memory bundle"),
        ((20000).to_bytes(8, "little") + b"[" * 20000, "not JSON"),
    ],
)
def test_files_that_are_no_bundles(path: Path, content: bytes, problem: str) -> None:
    path.write_bytes(content)
    with pytest.raises(BundleError, match=problem) as error:
        read_bundle(path)
    assert str(path) in str(error.value)


@pytest.mark.parametrize(
    ("once", "twice", "name"),
    [
        (b'{"__metadata__":', b'{"retrieval_keys":{"dtype":"F32"},"__metadata__":', "retrieval_keys"),
        (b'"dtype":"F32"', b'"dtype":"F16","dtype":"F32"', "dtype"),
        (b'"inducekv":', b'"inducekv":"{}","inducekv":', "inducekv"),
        (b'"inducekv":', b'"induce\\u006bv":"{}","inducekv":', "inducekv"),
        (b'\\"recipe\\":', b'\\"recipe\\":\\"x\\",\\"recipe\\":', "recipe"),
    ],
    ids=["tensor", "of a tensor", "metadata", "escaped", "in the metadata"],
)
def test_a_name_that_is_there_twice_is_refused(path: Path, once: bytes, twice: bytes, name: str) -> None:
    """Whichever of the two counts here, another reader may take the other one under the same digest."""
    write_bundle(PLAIN, path)
    content = path.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    header = content[8:end].rstrip().replace(once, twice, 1)
    assert len(header) > end - 8
    header += b" " * (-len(header) % 8)
    path.write_bytes(len(header).to_bytes(8, "little") + header + content[end:])
    with pytest.raises(BundleError, match=f"{path}: the header names '{name}' twice"):
        read_bundle(path)


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("none", "no such file"),
        (".", "not a regular file"),
        ("pipe", "not a regular file"),
        ("x" * 300, "File name too long"),
        ("a\0b", "not the name of a file"),
        ("a\ud800b", "not the name of a file"),
    ],
)
def test_names_that_are_no_files(tmp_path: Path, name: str, problem: str) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(BundleError, match=problem):
        read_bundle(tmp_path / name)


def test_the_header_decides_before_anything_else_is_read(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file, "_read_tensors", lambda *_: pytest.fail("the tensors were read"))
    write_bundle(PLAIN, path)
    served = FINGERPRINT.model_copy(update={"num_layers": 9, "tokenizer_digest": "1" * 64})
    differences = "^here was made for another backbone: num_layers: 3, the model has 9; tokenizer_digest"
    with pytest.raises(FingerprintMismatch, match=differences):
        read_bundle(path, backbone=served, name="here")
    with pytest.raises(BundleError, match=f"has {path.stat().st_size} bytes, more than the limit of 100"):
        read_bundle(path, max_bytes=100)
    os.truncate(path, 8 * 10**12)  # sparse: reading it would be noticed
    with pytest.raises(BundleError, match=r"trailing bytes: expected .* found 8000000000000"):
        read_bundle(path)
    with path.open("r+b") as opened:
        opened.write((2**40).to_bytes(8, "little"))
    with pytest.raises(BundleError, match="longer than 25165824"):
        read_bundle(path)


@pytest.mark.parametrize("change", [lambda content: content[:-1], lambda content: content.replace(b"xxx", b"xyz")])
def test_a_file_that_changes_while_it_is_read(path: Path, change: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    write_bundle(random_bundle(settings={"x": "x" * 20000}), path)
    read = file._read_tensors

    def changed(*arguments: Any) -> Any:
        path.write_bytes(change(path.read_bytes()))
        return read(*arguments)

    monkeypatch.setattr(file, "_read_tensors", changed)
    with pytest.raises(BundleError, match="the file changed while it was read"):
        read_bundle(path, verify=False)


# ---- content that is refused -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"gate": replace(GATE, tasks=("a", "c"))}, "entry 'e2' belongs to the task 'b', which the gate does not have"),
        ({"gate": random_gate(tasks=("a", "b", "c"))}, "gate task 'c' has no entries"),
        ({"gate": replace(GATE, tasks=("a", "a"))}, "gate task 'a' occurs more than once"),
        ({"gate": random_gate(tasks=())}, "a relevance gate needs tasks and what it looks at, or neither"),
        *((_gate(name, with_one(tensor, NAN)), f"{name} contains NaN") for name, tensor in GATE.tensors().items()),
        ({"gate": replace(GATE, prototypes=GATE.prototypes * 1e6)}, "contains NaN or inf"),  # beyond float16
        ({"gate": replace(GATE, prototypes=GATE.prototypes * 1.01)}, "gate_prototypes must have norm 1, found 1.01"),
        (_gate("gate_scale", with_one(GATE.scale, 0.0)), "gate_scale must be above 0, found 0"),
        (_gate("gate_floors", with_one(GATE.floors, 1.0)), "gate_floors must be at least 0 and below 1"),
        (_gate("gate_thresholds", torch.tensor([0.5, 0.0])), "gate_thresholds must be above 0.*found 0"),
        ({"gate": replace(GATE, layers=(2, 0))}, r"a gate looks at ascending layers below 3, found \[2, 0\]"),
        ({"gate": replace(GATE, layers=())}, "gate.layers|layers"),
        (_gate("gate_prototypes", GATE.prototypes[:1]), r"gate_prototypes must be .*\[2, 4, 16\], found"),
        (_gate("gate_prototypes", GATE.prototypes[:, :3]), "gate_floors must be"),
        (_gate("gate_weights", GATE.weights[:, :4]), r"gate_weights must be .*\[2, 8\], found .*\[2, 4\]"),
        (_gate("gate_thresholds", GATE.thresholds[:1]), "gate_thresholds must be"),
        ({"gate": replace(GATE, near=(-1.0,))}, "a gate of 2 tasks needs as many numbers `near`, found 1"),
        ({"gate": replace(GATE, near=(-1.0, 0.5))}, "near"),
        ({"weighting": "sqrt"}, 'a relevance gate needs another weighting than "sqrt"'),
    ],
)
def test_gates_that_cannot_be_used(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(BundleError, match=problem):
        random_gated_bundle(**changes)


@pytest.mark.parametrize(
    ("tensors", "bundle", "problem"),
    [
        (GATED.tensors(), PLAIN, "unknown tensors: gate_center, gate_floors"),
        (PLAIN.tensors(), GATED, "tensors are missing: gate_center, gate_floors"),
        (GATED.tensors() | {"gate_prototypes": GATE.prototypes}, GATED, "gate_prototypes must be F16"),
        (PLAIN.tensors() | {"\x1b[2J": torch.zeros(1)}, PLAIN, "unknown tensors"),
        (PLAIN.tensors() | {"x" * 70_000: torch.zeros(1)}, PLAIN, "unknown tensors"),
        (PLAIN.tensors() | {"payload_keys": PLAIN.payload_keys.float()}, PLAIN, "payload_keys must be F16"),
        (PLAIN.tensors() | {"temperature": torch.ones(1)}, PLAIN, r"temperature must be F32 \[\], found F32 \[1\]"),
        (PLAIN.tensors() | {"value_gates": torch.full((L + 1,), 0.5)}, PLAIN, "value_gates must be F32"),
    ],
)
def test_tensors_that_cannot_be_used(
    path: Path, tensors: dict[str, torch.Tensor], bundle: Bundle, problem: str
) -> None:
    save_raw(path, tensors, bundle.metadata.model_dump(mode="json"))
    for verify in (True, False):
        with pytest.raises(BundleError, match=problem) as error:
            read_bundle(path, verify=verify)
        assert str(error.value).isprintable()
        assert len(str(error.value)) <= 2000


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"format_version": 7, "payload_digests": []}, "format version 7 is not supported, expected 2"),
        ({"format_version": None}, "format version None is not supported, expected 2"),
        ({"gate": GATE.record.model_dump()}, "a relevance gate needs tasks and what it looks at, or neither"),
        ({"weighting": "cube"}, "weighting"),
        ({"budget": 4}, "5 entries exceed the budget of 4"),
        ({"entries": []}, "entries"),
        ({"entries": [raw(PLAIN)[1]["entries"][0]] * 5}, "'e0' occurs more than once"),
        ({"entries": [{**raw(PLAIN)[1]["entries"][0], "id": "x" * 257}]}, "entries.0.id: String should have at most"),
        ({"entries": raw(PLAIN)[1]["entries"][:4]}, "retrieval_keys must be F16 [4, 16], found F16 [5, 16]"),
        ({"payload_tokens": 8}, "payload_keys must be F16 [3, 5, 2, 8, 8]"),
        ({"surprise": 1}, "surprise"),
        ({"backbone": raw(PLAIN)[1]["backbone"] | {"num_layers": 10**30}}, "metadata: backbone.num_layers"),
    ],
)
def test_metadata_that_cannot_be_used(path: Path, change: dict[str, Any], problem: str) -> None:
    tensors, good = raw(PLAIN)
    save_raw(path, tensors, good | change)
    with pytest.raises(BundleError) as error:
        read_bundle(path)
    assert problem in str(error.value)
    assert str(path) in str(error.value)


def test_texts_that_are_no_metadata(path: Path) -> None:
    for text, problem in (("{no json", "not JSON"), ("[1]", "format version None"), ("{}", "format version None")):
        safetensors.torch.save_file(PLAIN.tensors(), path, metadata={METADATA_KEY: text})
        with pytest.raises(BundleError, match=problem):
            read_bundle(path)
    # The JSON of the header can escape a lone surrogate.
    write_bundle(random_bundle(recipe="abcdef"), path)
    path.write_bytes(path.read_bytes().replace(b"abcdef", rb"\ud800"))
    with pytest.raises(BundleError, match="header is not JSON"):
        read_bundle(path)


@pytest.mark.parametrize(
    ("tensors", "problem"),
    [
        ({"payload_keys": with_one(PLAIN.payload_keys, NAN)}, "NaN or infinite"),
        ({"retrieval_keys": with_one(PLAIN.retrieval_keys, NAN)}, "NaN or infinite"),
        ({"retrieval_keys": PLAIN.retrieval_keys * 1.01}, "must have norm 1, found 1.01"),
        ({"retrieval_keys": PLAIN.retrieval_keys * torch.eye(5)[0][:, None].half()}, "norm 1, found 0"),
        ({"temperature": torch.tensor(0.0)}, "temperature must be above 0"),
        ({"temperature": torch.tensor(NAN)}, "NaN or infinite"),
        ({"value_gates": torch.tensor([0.5, 0.0, 0.5])}, "value_gates must be above 0"),
        ({"layer_bias": torch.tensor([0.0, -INFINITE, 0.0])}, "NaN or infinite"),
    ],
)
def test_values_that_cannot_be_used(tensors: dict[str, torch.Tensor], problem: str, path: Path) -> None:
    bundle = replace(PLAIN, **tensors)  # type: ignore[arg-type]
    bundle = replace(bundle, metadata=bundle.metadata.model_copy(update={"digest": bundle_digest(bundle)}))
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
    with pytest.raises(BundleError, match="a relevance gate needs all of its tensors and at least one task"):
        with_metadata(replace(GATED, gate=None))
    with pytest.raises(BundleError, match="settings must be JSON values"):
        random_bundle(settings={"rate": NAN})
    with pytest.raises(BundleError, match=r"payload_values must be .*\[3, 5, 2, 3, 8\], found"):
        random_bundle(payload_keys=torch.zeros(L, 5, J, 3, D))


@pytest.mark.parametrize("gated", [False, True])
def test_many_entries_are_checked_in_linear_time(path: Path, gated: bool) -> None:
    """10,000 entries with both dates: tasks of their own, or adapters for half."""
    _, good = raw(PLAIN)
    numbers = range(10_000)
    tasks = [f"t{i}" for i in numbers]
    half = len(numbers) // 2
    dates = {"created_at": "2026-01-02T00:00:00Z", "expires_at": "2027-01-02T00:00:00Z"}
    many = good | {
        "budget": len(numbers),
        "entries": [{"id": f"e{i}", "task": tasks[i], "source_digest": "a" * 64, **dates} for i in numbers],
    }
    if gated:
        many |= {"form": "decoupled", "weighting": "uniform", "gate_tasks": tasks}
        many |= {"gate": GATE.record.model_dump(mode="json")}
        many |= {"entries": many["entries"][:half], "activations": dict.fromkeys(tasks[:half], "text")}
        records = [{"task": task, "path": "p", "digest": task, "rank": 1} for task in tasks[half:]]
        many |= {"task_adapters": records}
    save_raw(path, {"retrieval_keys": torch.zeros(1)}, many)
    gc.collect()
    gc.disable()  # what other tests have left in this process is not searched for garbage meanwhile
    try:
        began = time.thread_time()
        with pytest.raises(BundleError, match="tensors are missing"):
            read_bundle(path)
        assert time.thread_time() - began < 1
    finally:
        gc.enable()


# ---- writing -----------------------------------------------------------------------------------------------------


def test_a_header_that_is_too_long_to_be_read_is_not_written(path: Path) -> None:
    with pytest.raises(BundleError, match=r"a header of .* bytes, expected 25165824 at most"):
        write_bundle(random_bundle(settings={"x": "x" * MAX_HEADER_BYTES}), path)
    assert not path.exists()


def test_a_stale_digest_is_written_only_unchecked(path: Path) -> None:
    stale = replace(random_bundle(), temperature=torch.tensor(0.5))
    with pytest.raises(BundleError, match="does not match its digest"):
        write_bundle(stale, path)
    assert not path.exists()
    write_bundle(stale, path, verify=False)
    with pytest.raises(BundleError, match="does not match its digest"):
        read_bundle(path)
    with pytest.raises(BundleError, match="layer_bias must be"):
        write_bundle(replace(stale, layer_bias=torch.zeros(7)), path, verify=False)


@pytest.mark.parametrize("call", ["replace", "fsync"])
@pytest.mark.parametrize("failure", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_writing_replaces_the_old_file_whole(
    path: Path, monkeypatch: pytest.MonkeyPatch, call: str, failure: BaseException
) -> None:
    write_bundle(random_bundle(seed=1), path)
    before = path.read_bytes()

    def fail(*arguments: Any) -> None:
        raise failure

    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail)
        with pytest.raises(KeyboardInterrupt if isinstance(failure, KeyboardInterrupt) else BundleError):
            write_bundle(random_bundle(seed=2), path)
    assert path.read_bytes() == before
    assert os.listdir(path.parent) == [path.name]

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
    with pytest.raises(BundleError, match="nowhere"):
        write_bundle(random_bundle(), path.parent / "nowhere" / "m.safetensors")
