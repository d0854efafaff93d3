"""Pictures over HTTP: chats and teaching refuse what task data may not have, in the same words, and take the rest."""

from functools import cache
from pathlib import Path
from typing import Any

import httpx
import pytest

from inducekv_vllm.errors import TaskDataError
from inducekv_vllm.files.picture import decoded
from selector.cli.bundle import main
from selector.client import picture_part
from tests.encodings import encodings, in_mode, iptc, saved
from tests.engine.parity import World
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
