"""Bodies of requests: who may send one, how large it may be, and what other requests notice of it."""

import asyncio
import json
from argparse import Namespace
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request
from starlette.types import Message

import server.bodies
from inducekv_vllm.bundle import write_bundle
from inducekv_vllm.vllm_seams.config import ADMIN_HEADER, InduceKVConfig
from server.access import Access
from server.bodies import MOST_BYTES, parsed
from server.endpoint import InduceKVEndpoint
from tests.server.registries import BUNDLES, Workers, begin, models

pytestmark = pytest.mark.anyio
ADMIN = {ADMIN_HEADER: "admin"}
CHANGES = ("load_memory_bundle", "rollback_memory_bundle", "forget_memory_versions", "unload_memory_bundle")
TAUGHT = ("POST", "/v1/memory_bundles/m/examples"), ("PATCH", "/v1/memory_bundles/m/examples/e")
WITH_BODY = [*(("POST", f"/v1/{change}") for change in CHANGES), *TAUGHT]
LIMIT = 1000


@pytest.fixture
async def app(tmp_path: Path) -> FastAPI:
    """The bundle "m" is loaded; POST /v1/chat/completions says how long its body is."""
    app = FastAPI()
    app.state.args = Namespace(api_key=None)
    app.state.openai_serving_models = models()

    @app.post("/v1/chat/completions")
    async def chat(body: dict[str, Any], request: Request) -> int:
        return len(await request.body())

    InduceKVEndpoint().attach_router(app)
    write_bundle(BUNDLES["a"], tmp_path / "a.safetensors")
    app.state.inducekv_registry = begin(InduceKVConfig(), Workers(), tmp_path / "state")
    await app.state.inducekv_registry.load("m", str(tmp_path / "a.safetensors"))
    app.state.inducekv_access = Access([str(tmp_path)], "admin")
    return app


async def answered(app: FastAPI, method: str, path: str, **headers: str) -> tuple[int, int]:
    """The status of a request whose body is endless, and how many bytes of it the server has asked for."""
    sent: list[Message] = []
    read = 0

    async def receive() -> Message:
        nonlocal read
        read += 100
        return {"type": "http.request", "body": b" " * 100, "more_body": True}

    async def send(message: Message) -> None:
        sent.append(message)

    fields = {"content-type": "application/json", **headers}
    scope: dict[str, Any] = {"type": "http", "http_version": "1.1", "method": method, "scheme": "http", "path": path}
    scope |= {"query_string": b"", "root_path": "", "client": ("10.0.0.9", 1), "server": ("server", 80)}
    scope["headers"] = [(name.lower().encode(), value.encode()) for name, value in fields.items()]
    await app(scope, receive, send)
    return sent[0]["status"], read


@pytest.mark.parametrize(("method", "path"), WITH_BODY)
async def test_the_body_of_a_stranger_is_not_read(app: FastAPI, method: str, path: str) -> None:
    assert await answered(app, method, path) == (401, 0)
    assert await answered(app, method, path, **{ADMIN_HEADER: "another"}) == (401, 0)


async def test_a_body_that_says_that_it_is_too_large_is_not_read(app: FastAPI) -> None:
    declared = {"Content-Length": str(MOST_BYTES + 1)}
    for method, path in WITH_BODY:
        assert await answered(app, method, path, **ADMIN, **declared) == (413, 0)


async def test_a_body_is_read_up_to_the_limit(app: FastAPI, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it says."""
    path = "/v1/load_memory_bundle"
    monkeypatch.setattr(server.bodies, "MOST_BYTES", LIMIT)
    for declared in ({}, {"Content-Length": "5"}):
        assert await answered(app, "POST", path, **ADMIN, **declared) == (413, LIMIT + 100)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as client:
        refused = (await client.post(path, content=b" " * (LIMIT + 1), headers=ADMIN)).json()["error"]
        assert refused["message"].startswith(f"the body of a request may have {LIMIT} bytes here")
        assert refused["code"] == 413
        answer = await client.post(path, content=b"{" + b" " * (LIMIT - 2) + b"}", headers=ADMIN)
        assert answer.status_code == 422  # it is read, and here it may say nothing


async def test_an_error_has_the_type_of_its_status(app: FastAPI) -> None:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as client:
        call = partial(client.post, "/v1/unload_memory_bundle")
        answers = [
            await call(json={"name": "m"}),
            await call(json={"name": "nobody"}, headers=ADMIN),
            await call(json={"name": "m", "expected_digest": "0"}, headers=ADMIN),
        ]
    found = [(answer.status_code, answer.json()["error"]["type"]) for answer in answers]
    assert found == [(401, "Unauthorized"), (404, "NotFoundError"), (409, "Conflict")]


async def test_only_our_routes_have_a_limit(app: FastAPI) -> None:
    text = b'{"a": "' + b"x" * MOST_BYTES + b'"}'
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as client:
        for path, status in (("/v1/chat/completions", 200), ("/v1/unload_memory_bundle", 413)):
            answer = await client.post(path, content=text, headers={**ADMIN, "Content-Type": "application/json"})
            assert answer.status_code == status


async def test_other_requests_go_on_while_a_large_body_is_parsed() -> None:
    value = [{"id": str(number), "answer": "so"} for number in range(300_000)]
    body = json.dumps(value).encode()
    turns = 0

    async def other_requests() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    others = asyncio.create_task(other_requests())
    await asyncio.sleep(0)
    before, found = turns, await parsed(body)
    assert found == value
    assert turns - before > 5
    others.cancel()
