"""Pictures over HTTP: chats and teaching refuse what task data may not have, in the same words, and take the rest."""

from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest

from inducekv_vllm.bundle import FactRecord, read_bundle
from inducekv_vllm.errors import TaskDataError
from inducekv_vllm.files.picture import decoded
from selector.api import read
from selector.cli.bundle import main
from selector.client import picture_part
from tests.encodings import encodings, in_mode, iptc, saved
from tests.engine.parity import World
from tests.mutations import damaged
from tests.server.http import Bundles

HEIC = b"\0\0\0\x24ftypheic\0\0\0\0mif1heic"


@cache
def said_of(data: bytes) -> str | None:
    """Why task data with this picture is refused; None if it is not."""
    try:
        decoded(data)
    except TaskDataError as error:
        return str(error)
    return None


def question(data: bytes, text: str = "What is this?") -> list[dict[str, Any]]:
    parts = [picture_part("image/png", data), {"type": "text", "text": text}]
    return [{"role": "user", "content": parts}]


def chat(url: str, model: str, data: bytes) -> httpx.Response:
    body = {"model": model, "messages": question(data), "max_tokens": 1}
    return httpx.post(f"{url}/v1/chat/completions", json=body, timeout=300)


def teach(bundles: Bundles, data: bytes) -> httpx.Response:
    body = {"examples": [{"id": "shown", "messages": question(data), "answer": "a"}]}
    url = f"{bundles.url}/v1/memory_bundles/pictures/examples"
    return httpx.post(url, json=body, headers=bundles.headers, timeout=300)


def message(response: httpx.Response) -> str:
    return str(response.json()["error"]["message"])


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (saved(in_mode("1").resize((13_000, 13_000)), "PNG"), "13000 x 13000 = 169000000 pixels, more than 50000000"),
        (saved(in_mode("1").resize((14_000, 14_000)), "PNG"), "196000000 pixels, more than 50000000"),
        (encodings()["PNG, RGB"][:-30], "cannot be decoded: image file is truncated"),
        (encodings()["EPS, RGB"], "found bytes that begin with b'%!PS-Adobe-3'"),
        (iptc(encodings()["EPS, RGB"]), "found bytes that begin with b'\\x1c"),
        (HEIC, "found HEIC, as iPhones save photographs: save it as JPEG"),
        (b"", "found an empty file"),
    ],
    ids=["169 megapixels", "196 megapixels", "cut", "EPS", "EPS in IPTC", "HEIC", "empty"],
)
def test_what_task_data_may_not_have(server: str, bundles: Bundles, data: bytes, reason: str) -> None:
    said = said_of(data)
    assert said is not None
    assert reason in said
    for response in (chat(server, "base", data), chat(server, "first", data), teach(bundles, data)):
        assert response.status_code == 400, response.text
        assert said in message(response)
    assert "example shown: " in message(response)
    assert "pictures" not in bundles.cards()


def by_command(model: Path, path: Path) -> FactRecord | None:
    output = path.with_suffix(".safetensors")
    if main(["teach", "--model", str(model), "--task", str(path), "--output", str(output)]) != 0:
        assert not output.exists()
        return None
    (fact,) = read_bundle(output).metadata.facts
    return fact


def from_python(path: Path) -> bytes | str:
    """The pixels, or what is said."""
    try:
        (example,) = read(path)
    except TaskDataError as error:
        return str(error)
    return example.load_images()[0].tobytes()


def test_facts_of_files_are_found_over_http(server: str, bundles: Bundles, world: World, tmp_path: Path) -> None:
    """Of every mode that is read: palettes with a clear colour, grey with alpha, CMYK, 16 bits and all others."""
    files = {name: data for name, data in encodings().items() if said_of(data) is None}
    rows = ["id,image,question,answer"]
    for number, data in enumerate(files.values()):
        (tmp_path / f"{number}.png").write_bytes(data)
        rows.append(f"{number},{number}.png,What is part {number} of this?,a")
    (table := tmp_path / "parts.csv").write_text("\n".join(rows))
    assert (
        main(
            [
                "teach",
                "--model",
                str(world.model),
                "--task",
                str(table),
                "--output",
                str(tmp_path / "parts.safetensors"),
            ]
        )
        == 0
    )
    with bundles.loaded("parts", tmp_path / "parts.safetensors"):
        for number, (name, data) in enumerate(files.items()):
            messages = question(data, f"What is part {number} of this?")
            trace = bundles.server.ask("parts", messages, max_tokens=1, trace=True).trace
            assert trace is not None
            assert [fact["id"] for fact in trace["facts"]] == [f"{number}"], name
    assert len(files) > 100


@pytest.mark.parametrize("count", [20, pytest.param(200, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])])
def test_mutated_pictures(count: int, server: str, bundles: Bundles, world: World, tmp_path: Path) -> None:
    """Of every mode and format, damaged or not, under any name: the command, Python, teaching and chats say the same.

    What they take, they take for the same pixels: a fact's digest is over these.
    """
    rng, refused = Random(68), 0
    for number in range(count):
        data = rng.choice(list(encodings().values()))
        data = damaged(rng, data) if rng.random() < 0.8 else data
        name, path = f"{number}.{rng.choice(('png', 'jpg', 'gif', 'txt'))}", tmp_path / f"{number}.csv"
        (tmp_path / name).write_bytes(data)
        path.write_text(f"id,image,question,answer\nshown,{name},What is this?,a\n")
        said, taught, found = said_of(data), by_command(world.model, path), from_python(path)
        assert isinstance(found, str) == (taught is None) == (said is not None), name
        responses = chat(server, "base", data), teach(bundles, data)
        if said is not None:
            refused += 1
            assert said in str(found)
            assert [each.status_code for each in responses] == [400, 400], responses
            assert all(said in message(each) for each in responses)
            continue
        assert [each.status_code for each in responses] == [200, 200], responses
        assert taught is not None
        (listed,) = bundles.server.facts("pictures")
        assert (listed["source_digest"], listed["picture"]) == (taught.source_digest, data_url(taught))
    assert count / 5 < refused < count * 4 / 5
    assert bundles.unload("pictures").status_code == 200
    bundles.wait_until_drained()


def data_url(fact: FactRecord) -> str:
    assert fact.picture is not None
    return fact.picture.data_url
