"""Forgetting on a running server: nothing answers with what it has forgotten, and no file of its own holds it."""

import contextlib
import json
import sqlite3
from pathlib import Path
from typing import Any

import httpx
import openai
import torch

from inducekv_vllm.bundle import Bundle, write_bundle
from inducekv_vllm.files.audit_chain import read, verify
from inducekv_vllm.vllm_seams.config import ADMIN_HEADER
from selector.update.forget import without_entries
from tests.bundles import remade
from tests.engine.parity import World, prompts
from tests.server.http import Bundles, ask, trace_at, trace_of, wait_until
from tests.server.launch import ADMIN_KEY, STATE

GONE, KEPT = 3, 5  # rows
MARKS = {"gone": 0.7178, "kept": 0.6182}  # the numbers that their payloads consist of
LENGTH = 8  # numbers in a row that make a find
NAME = "custody"  # of no other test of this server


def marked(bundle: Bundle) -> dict[str, torch.Tensor]:
    """A bundle's tensors with two entries whose payload and key can be recognised wherever they are."""
    names = ("payload_keys", "payload_values", "retrieval_keys")
    tensors = {name: tensor.clone() for name, tensor in bundle.tensors().items() if name in names}
    for row, mark in ((GONE, MARKS["gone"]), (KEPT, MARKS["kept"])):
        for name in ("payload_keys", "payload_values"):
            tensors[name][:, row] = mark
        tensors["retrieval_keys"][row] = _key(mark, tensors["retrieval_keys"].shape[1])
    return tensors


def _key(mark: float, width: int) -> torch.Tensor:
    """A vector [d] of length 1, of two numbers in turn."""
    a = mark / width**0.5
    return torch.tensor([a, (2 / width - a * a) ** 0.5]).repeat(width // 2).half()


def patterns(width: int) -> dict[str, bytes]:
    """A few of the numbers in a row, as a bundle has them."""
    found = {}
    for name, mark in MARKS.items():
        for kind, numbers in (("payload", torch.full((LENGTH,), mark).half()), ("key", _key(mark, width)[:LENGTH])):
            found[f"{name} {kind}"] = numbers.view(torch.uint8).numpy().tobytes()
    return found


def forget(bundles: Bundles, name: str, **body: str) -> httpx.Response:
    url = f"{bundles.url}/v1/forget_memory_versions"
    return httpx.post(url, json={"name": name, **body}, headers=bundles.headers, timeout=60)


def kept(state: Path) -> set[str]:
    with contextlib.closing(sqlite3.connect(state)) as found:
        return {digest for (digest,) in found.execute("SELECT digest FROM contents WHERE bundle IS NOT NULL")}


def test_nothing_of_a_forgotten_entry_is_left(
    world: World, bundles: Bundles, client: openai.OpenAI, server_folder: Path, tmp_path: Path
) -> None:
    sought = patterns(world.backbone.fingerprint.hidden_size)

    def finds() -> set[str]:
        """What is in the server's files."""
        files = [path.read_bytes() for path in server_folder.rglob("*") if path.is_file()]
        return {name for name, pattern in sought.items() if any(pattern in content for content in files)}

    whole = remade(world.merged["other"], **marked(world.merged["other"]))
    after = without_entries(whole, [GONE])
    write_bundle(whole, tmp_path / "whole.safetensors")
    write_bundle(after, tmp_path / "after.safetensors")

    assert bundles.load(NAME, tmp_path / "whole.safetensors").status_code == 200
    asked = prompts(3, seed=91)
    for top_k in (2, 12):
        extra = {"vllm_xargs": {"inducekv_trace": 1, "inducekv_top_k": top_k}}
        responses = [ask(client, NAME, prompt, extra_body=extra) for prompt in asked]
    shown = trace_of(responses[0])
    assert finds() == sought.keys(), "the search finds what is there"

    assert bundles.load(NAME, tmp_path / "after.safetensors", replace=True).status_code == 200
    bundles.wait_until_drained()
    assert whole.digest in kept(server_folder / STATE), "the version before is kept for a rollback"
    assert trace_at(f"{bundles.url}/v1", responses[0].id).status_code == 200

    response = forget(bundles, NAME, expected_digest=after.digest)
    assert response.status_code == 200, response.text
    assert response.json() == {"name": NAME, "digest": after.digest, "forgotten": [whole.digest], "in_use": []}
    assert finds() == {"kept payload", "kept key"}

    assert whole.digest not in kept(server_folder / STATE)
    assert trace_at(f"{bundles.url}/v1", responses[0].id).status_code == 404
    url = f"{bundles.url}/v1/rollback_memory_bundle"
    response = httpx.post(url, json={"name": NAME}, headers={ADMIN_HEADER: ADMIN_KEY}, timeout=60)
    assert response.status_code == 400
    assert "has no earlier version" in response.json()["error"]["message"]
    assert bundles.unload(NAME).status_code == 200
    wait_until(lambda: not finds())

    def records_of_log() -> list[dict[str, Any]]:
        return [json.loads(record) for _, record in read(server_folder / STATE)]

    gone = {(whole.digest, True), (after.digest, True)}  # their tokens in the pool are overwritten
    wait_until(lambda: gone <= {(record.get("digest"), record.get("erased")) for record in records_of_log()})
    verify(server_folder / STATE)
    records = records_of_log()
    of_name = [(record["event"], record.get("digest")) for record in records if record.get("name") == NAME]
    answers = [("answer", whole.digest)] * 6
    changes = [("replace", after.digest), ("forget", None), ("refusal", None), ("unload", after.digest)]
    assert of_name == [("load", whole.digest), *answers, *changes]
    assert {record["by"] for record in records if record["event"] in ("load", "forget")} >= {"admin at 127.0.0.1"}
    (answer,) = (record for record in records if record.get("request") == responses[0].id)
    assert answer["entries"] == {entry["id"]: entry["weight"] for entry in shown["entries"]}
    assert answer.keys() == {"n", "time", "event", "request", "by", "name", "digest", "task", "entries", "previous"}
    text = "".join(record for _, record in read(server_folder / STATE))
    assert ADMIN_KEY not in text
    assert "Bearer" not in text
    assert asked[0].question not in text
