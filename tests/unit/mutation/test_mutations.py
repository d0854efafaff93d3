"""A mutated file is refused with an error of ours, or read as what it is.

A few mutations in every run; 10,000 bundles and 2,000 task files with `make test-mutations`.
Tables are in `test_tables.py`.
"""

import copy
import io
import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from inducekv_vllm.bundle import METADATA_KEY, EntryRecord, read_bundle, sign_digest, write_bundle
from inducekv_vllm.errors import BundleError, TaskDataError
from selector.data.examples import read_task
from tests.bundles import D, G, J, L, random_bundle, random_gated_bundle, random_maps
from tests.mutations import damaged
from tests.task_data import record
from tests.tiny_models import picture

VALUES = (
    *(None, True, [], {}, [[]], "", "x", "\0", "é", "\ud800", "../x", "x" * 70_000, "9" * 64, "[" * 100_000),
    *(0, -1, 1, 2, 3, 5, 0.5, 1e308, float("nan"), 2**31, 2**63, 2**64, 10**40),
)
SLOW = [pytest.mark.slow, pytest.mark.timeout(7200)]


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Each member of lists and objects: what it is in, and where."""
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in keys:
        yield value, key
        yield from places(value[key])


def edited(rng: Random, value: Any) -> Any:
    """With one to three members that are gone, twice there, or something else."""
    value = copy.deepcopy(value)
    for _ in range(rng.randint(1, 3)):
        if members := list(places(value)):
            inside, key = rng.choice(members)
            new = rng.choice((inside[key], *VALUES))
            match rng.choice(("remove", "add", "replace", "replace")):
                case "remove":
                    del inside[key]
                case "add":
                    inside.update({"else": new}) if isinstance(inside, dict) else inside.append(new)
                case _:
                    inside[key] = new
    return value


def with_header(rng: Random, content: bytes) -> bytes:
    """With other JSON in the header, or in the metadata within it."""
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:end])
    if rng.random() < 0.6:
        inner = header["__metadata__"]
        inner[METADATA_KEY] = json.dumps(edited(rng, json.loads(inner[METADATA_KEY])))
    else:
        header = edited(rng, header)
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + content[end:]


@pytest.mark.parametrize("mutations", [200, pytest.param(10_000, marks=SLOW)])
def test_mutated_bundles(mutations: int, tmp_path: Path) -> None:
    """Bundles of each form, each with another part that is optional."""
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
    rng, path = Random(0), tmp_path / "bundle.safetensors"
    for number in range(mutations):
        original = bundles[number % len(bundles)]
        write_bundle(original, path)
        path.write_bytes(rng.choice((damaged, with_header))(rng, path.read_bytes()))
        with suppress(BundleError):
            bundle = read_bundle(path)
            assert bundle.metadata == original.metadata
            assert all(torch.equal(tensor, original.tensors()[name]) for name, tensor in bundle.tensors().items())


def task_ids(path: Path) -> list[str]:
    """The ids of a valid file, read by other code than the repository's."""
    rest, values = path.read_text().lstrip("\ufeff \t\r\n"), list[Any]()
    while rest:
        value, end = json.JSONDecoder().raw_decode(rest)
        values += value if path.suffix == ".json" else [value]
        rest = rest[end:].lstrip(" \t\r\n")
    ids = []
    for number, value in enumerate(values, start=1):
        id, task = value.get("id"), value.get("task") or path.stem
        ids.append(f"{task}/{number}" if id is None or id == "" or id != id else str(id))  # NaN is none
    return ids


@pytest.mark.parametrize("mutations", [100, pytest.param(2_000, marks=SLOW)])
def test_mutated_task_files(mutations: int, tmp_path: Path) -> None:
    """The file itself, or the picture that its first example names."""
    turns = [{"from": "human", "value": "<image>\nWhich colour?"}, {"from": "gpt", "value": "red"}]
    values: dict[str, list[Any]] = {
        ".json": [{"id": i, "image": f"images/{i}.png", "conversations": turns} for i in range(3)],
        ".jsonl": [record(0), record(1, id=7), record(2)],
    }
    pictures = []
    for kind in ("PNG", "JPEG", "GIF", "WEBP", "BMP", "TIFF"):
        picture(0).save(drawn := io.BytesIO(), kind)
        pictures.append(drawn.getvalue())
    (tmp_path / "images").mkdir()
    for number in range(3):
        (tmp_path / "images" / f"{number}.png").write_bytes(pictures[0])
    rng = Random(0)
    for _ in range(mutations):
        suffix, shown, change = rng.choice(list(values)), rng.choice(pictures), rng.choice(("bytes", "json", "picture"))
        examples = [edited(rng, values[suffix][0]) if change == "json" else values[suffix][0], *values[suffix][1:]]
        text = json.dumps(examples) if suffix == ".json" else "".join(json.dumps(each) + "\n" for each in examples)
        content = damaged(rng, text.encode()) if change == "bytes" else text.encode()
        shown = damaged(rng, shown) if change == "picture" else shown
        (path := tmp_path / f"train{suffix}").write_bytes(content)
        (tmp_path / "images" / "0.png").write_bytes(shown)
        with suppress(TaskDataError):
            assert [example.id for example in read_task(path)] == task_ids(path)
