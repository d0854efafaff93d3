"""A mutated file is refused with an error of ours, or read as what it is.

A few mutations in every run; 10,000 bundles and 2,000 task files with `make test-mutations`.
"""

from __future__ import annotations

import copy
import io
import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from inducekv_vllm.bundle import EntryRecord, read_bundle, sign_digest, write_bundle
from inducekv_vllm.bundle.file import METADATA_KEY
from inducekv_vllm.bundle.signature import SIGNATURE_KEY
from inducekv_vllm.bundle.tensors import PAYLOADS
from inducekv_vllm.errors import BundleError, TaskDataError
from selector.data.examples import read_task
from tests.inducekv_vllm.bundles import D, G, J, L, older, random_bundle, random_gated_bundle, random_maps
from tests.selector.conftest import record
from tests.tiny_models import picture

VALUES = (
    *(None, True, [], {}, [[]], "", "x", "\0", "é", "\ud800", "../x", "x" * 70_000, "9" * 64, "[" * 100_000),
    *(0, -1, 1, 2, 3, 5, 0.5, 1e308, float("nan"), 2**31, 2**63, 2**64, 10**40),
)
KINDS = ("PNG", "JPEG", "GIF", "WEBP", "BMP", "TIFF")


def run(examples: int, mutated: st.SearchStrategy[Any], read: Callable[[Any], None]) -> None:
    """The same examples in every run, however slow the machine is; a failing one is not made smaller for minutes."""
    repeatable = settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        database=None,
        phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )
    repeatable(given(mutated)(lambda each: read(each)))()


def counted(few: int, many: int) -> Any:
    marks = [pytest.mark.slow, pytest.mark.timeout(7200)]
    return pytest.mark.parametrize("examples", [few, pytest.param(many, marks=marks)])


# ------------------------------------------------------------------------------------------------- bytes and JSON


def damaged(draw: st.DrawFn, content: bytes) -> bytes:
    """With one change of its bytes, most of them near the beginning."""
    changed = bytearray(content)
    place = draw(st.integers(0, min(len(content), draw(st.sampled_from((64, 4000, 10**9)))) - 1))
    piece = content[place : place + draw(st.integers(1, 400))]
    match draw(st.sampled_from(("bit", "cut", "insert", "remove", "repeat", "append"))):
        case "bit":
            changed[place] ^= 1 << draw(st.integers(0, 7))
        case "cut":
            del changed[place:]
        case "insert":
            changed[place:place] = draw(
                st.binary(min_size=1, max_size=8) | st.sampled_from((b"\0", b"\n", b"\xff\xfe"))
            )
        case "remove":
            del changed[place : place + len(piece)]
        case "repeat":
            changed[place:place] = piece
        case "append":
            changed += piece
    return bytes(changed)


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Each member of lists and objects: what it is in, and where."""
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in keys:
        yield value, key
        yield from places(value[key])


def edited(draw: st.DrawFn, value: Any) -> Any:
    """With one to three members that are gone, twice there, or something else."""
    value = copy.deepcopy(value)
    for _ in range(draw(st.integers(1, 3))):
        if not (members := list(places(value))):
            return value
        inside, key = draw(st.sampled_from(members))
        match draw(st.sampled_from(("remove", "add", "other", "other"))):
            case "remove":
                del inside[key]
            case "add" if isinstance(inside, dict):
                inside["else"] = inside[key]
            case "add":
                inside.append(inside[key])
            case _:
                inside[key] = draw(st.sampled_from(VALUES))
    return value


# ------------------------------------------------------------------------------------------------- bundles


def contents(path: Path) -> list[bytes]:
    """Files of the formats, each with another part that is optional."""
    decoupled: dict[str, Any] = {"form": "decoupled", "weighting": "uniform", "activations": {"t": "text"}}
    date = datetime(2027, 1, 2, 3, 4, 5, tzinfo=UTC)
    dated = tuple(EntryRecord(id=f"é{i}", task="t", source_digest="ab", expires_at=date) for i in range(5))
    mapped = random_bundle(payload_tokens=1, **decoupled, **random_maps((L, 5, J, 1, D), 2, G), entries=dated)
    signature = sign_digest(mapped.digest, Ed25519PrivateKey.from_private_bytes(bytes(32)))
    bundles = [
        random_bundle(payload_tokens=1),
        random_gated_bundle(payload_tokens=1),
        replace(mapped, signature=signature),
    ]
    found = []
    for bundle in (*bundles, older(bundles[0])):
        write_bundle(bundle, path)
        found.append(path.read_bytes())
    return found


def with_header(draw: st.DrawFn, content: bytes) -> bytes:
    """With other JSON in the header, or in the metadata or the signature within it."""
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:end])
    inner = header["__metadata__"]
    if (key := draw(st.sampled_from((None, METADATA_KEY, SIGNATURE_KEY)))) in inner:
        inner[key] = json.dumps(edited(draw, json.loads(inner[key])))
    else:
        header = edited(draw, header)
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + content[end:]


@counted(200, 10_000)
def test_mutated_bundles(examples: int, tmp_path: Path) -> None:
    path = tmp_path / "bundle.safetensors"
    files = contents(path)
    originals, outcomes = [], Counter[bool]()
    for content in files:
        path.write_bytes(content)
        originals.append(read_bundle(path))

    @st.composite
    def mutated(draw: st.DrawFn) -> tuple[int, bytes, int]:
        number = draw(st.integers(0, len(files) - 1))
        change = draw(st.sampled_from((damaged, with_header)))
        return number, change(draw, files[number]), draw(st.integers(0, 5))

    def read(mutation: tuple[int, bytes, int]) -> None:
        number, content, first = mutation
        original = originals[number]
        path.write_bytes(content)
        for known in (None, set(original.metadata.payload_digests[first:])):
            try:
                bundle = read_bundle(path, known=None if known is None else lambda _, there=known: there)
            except BundleError:
                outcomes[False] += 1
                continue
            outcomes[True] += 1
            assert bundle.metadata == original.metadata
            for name, tensor in bundle.tensors().items():
                whole = original.tensors()[name]
                rows = slice(None) if bundle.rows is None or name not in PAYLOADS else torch.from_numpy(bundle.rows)
                assert torch.equal(tensor, whole[:, rows] if name in PAYLOADS else whole)

    run(examples, mutated(), read)
    assert set(outcomes) == {True, False}


# ------------------------------------------------------------------------------------------------- task files


def task_values(suffix: str) -> list[Any]:
    turns = [{"from": "human", "value": "<image>\nWhich colour?"}, {"from": "gpt", "value": "red"}]
    if suffix == ".json":
        return [{"id": i, "image": f"images/{i}.png", "conversations": turns} for i in range(3)]
    return [record(0), record(1, id=7), record(2)]


def task_content(suffix: str, values: list[Any]) -> bytes:
    return (json.dumps(values) if suffix == ".json" else "\n".join(map(json.dumps, values)) + "\n").encode()


def task_ids(path: Path) -> list[str]:
    """The ids of a valid file, read by other code than the repository's."""
    content = path.read_text()
    lines = [line for line in content.split("\n") if line.strip()]
    values = json.loads(content) if path.suffix == ".json" else list(map(json.loads, lines))
    return [str(value["id"]) for value in values]


@counted(100, 2_000)
def test_mutated_task_files(examples: int, tmp_path: Path) -> None:
    outcomes, pictures = Counter[bool](), []
    (tmp_path / "images").mkdir()
    for kind in KINDS:
        picture(0).save(drawn := io.BytesIO(), kind)
        pictures.append(drawn.getvalue())

    @st.composite
    def mutated(draw: st.DrawFn) -> tuple[str, bytes, bytes]:
        """The suffix, the file, and the picture that its first example names."""
        suffix, shown = draw(st.sampled_from((".jsonl", ".json"))), draw(st.sampled_from(pictures))
        values = task_values(suffix)
        match draw(st.sampled_from(("bytes", "json", "picture"))):
            case "bytes":
                return suffix, damaged(draw, task_content(suffix, values)), shown
            case "json":
                return suffix, task_content(suffix, [edited(draw, values[0]), *values[1:]]), shown
            case _:
                return suffix, task_content(suffix, values), damaged(draw, shown)

    def read(mutation: tuple[str, bytes, bytes]) -> None:
        suffix, content, shown = mutation
        (path := tmp_path / f"train{suffix}").write_bytes(content)
        for number in range(3):
            (tmp_path / "images" / f"{number}.png").write_bytes(pictures[0] if number else shown)
        try:
            examples = read_task(path)
        except TaskDataError:
            outcomes[False] += 1
        else:
            outcomes[True] += 1
            assert [example.id for example in examples] == task_ids(path)

    run(examples, mutated(), read)
    assert set(outcomes) == {True, False}
