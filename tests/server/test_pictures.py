"""Pictures over HTTP: chats and teaching refuse what task data may not have, in the same words, and take the rest."""

from __future__ import annotations

from functools import cache
from random import Random
from typing import Any

import httpx
import pytest

from inducekv_vllm.errors import TaskDataError
from inducekv_vllm.files.picture import decoded
from selector.client import picture_part
from tests.encodings import encodings, in_mode, iptc, saved
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


def question(data: bytes) -> list[dict[str, Any]]:
    parts = [picture_part("image/png", data), {"type": "text", "text": "What is this?"}]
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


@pytest.mark.parametrize("count", [20, pytest.param(200, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])])
def test_mutated_pictures(server: str, bundles: Bundles, count: int) -> None:
    """Damaged files: what task data takes is answered and taught, and what it refuses is refused in the same words."""
    rng, refused = Random(68), 0
    for _ in range(count):
        data = damaged(rng, rng.choice(list(encodings().values())))
        said = said_of(data)
        refused += said is not None
        for response in (chat(server, "base", data), teach(bundles, data)):
            assert response.status_code == (200 if said is None else 400), response.text
            assert said is None or said in message(response)
    assert 0 < refused < count
    assert bundles.unload("pictures").status_code == 200
    bundles.wait_until_drained()
