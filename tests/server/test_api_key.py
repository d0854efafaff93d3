"""Holders of the API key may list bundles and ask about them; changes need the admin key too.

vLLM's check of the key stands before our routes, as in its server.
"""

from argparse import Namespace
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
from fastapi import FastAPI
from vllm.entrypoints.serve.middleware.authenticate import AuthenticationMiddleware

from inducekv_vllm.bundle import write_bundle
from inducekv_vllm.vllm_seams.config import ADMIN_HEADER, InduceKVConfig
from server.access import Access
from server.endpoint import InduceKVEndpoint
from tests.server.registries import BUNDLES, DIGEST, Workers, begin

pytestmark = pytest.mark.anyio
USER = {"Authorization": "Bearer user"}
ADMIN = {ADMIN_HEADER: "admin"}
CHANGES = ("load_memory_bundle", "rollback_memory_bundle", "forget_memory_versions", "unload_memory_bundle")
QUESTIONS = ("/v1/memory_bundles", "/v1/memory_bundles/m", "/v1/memory_server")


@pytest.fixture
async def client(tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    """The bundle "m" is a; b is left to load."""
    for name in "ab":
        write_bundle(BUNDLES[name], tmp_path / f"{name}.safetensors")
    app = FastAPI()
    app.state.args = Namespace(api_key=["user"])
    InduceKVEndpoint().attach_router(app)
    app.add_middleware(AuthenticationMiddleware, tokens=["user"])
    registry = begin(InduceKVConfig(), Workers(), tmp_path / "state")
    await registry.load("m", str(tmp_path / "a.safetensors"))
    app.state.inducekv_registry = registry
    app.state.inducekv_engine = SimpleNamespace(facts=SimpleNamespace(judged=None))
    app.state.inducekv_access = Access([str(tmp_path)], "admin")
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as client:
        yield client


def body(change: str) -> dict[str, object]:
    more: dict[str, object] = {"path": "b.safetensors", "replace": True} if change.startswith("load") else {}
    return {"name": "m", **more}


async def test_a_holder_of_the_api_key_may_list_and_not_change(client: httpx.AsyncClient) -> None:
    for route in QUESTIONS:
        assert (await client.get(route, headers=USER)).status_code == 200
    (card,) = (await client.get("/v1/memory_bundles", headers=USER)).json()["data"]
    assert (card["digest"], card["path"]) == (DIGEST["a"], None)
    for change in CHANGES:
        for key in ({}, {ADMIN_HEADER: "user"}):
            answer = await client.post(f"/v1/{change}", json=body(change), headers=USER | key)
            assert (answer.status_code, answer.json()["error"]["code"]) == (401, 401), answer.text
    (card,) = (await client.get("/v1/memory_bundles", headers=USER | ADMIN)).json()["data"]
    assert (card["digest"], Path(card["path"]).name) == (DIGEST["a"], "a.safetensors")


async def test_without_the_api_key_not_even_the_admin_is_heard(client: httpx.AsyncClient) -> None:
    for headers in ({}, ADMIN, {**ADMIN, "Authorization": "Bearer admin"}):
        for route in QUESTIONS:
            assert (await client.get(route, headers=headers)).status_code == 401
        for change in CHANGES:
            assert (await client.post(f"/v1/{change}", json=body(change), headers=headers)).status_code == 401


async def test_both_keys_change(client: httpx.AsyncClient) -> None:
    for change, digest in zip(CHANGES, "baa ", strict=True):
        answer = await client.post(f"/v1/{change}", json=body(change), headers=USER | ADMIN)
        assert answer.status_code == 200, answer.text
        found = (await client.get("/v1/memory_bundles", headers=USER)).json()["data"]
        assert [card["digest"] for card in found] == ([DIGEST[digest]] if digest.strip() else [])
