"""What a registry records of its changes, which signatures it asks for, and what it forgets; the workers take all."""

import asyncio
import contextlib
import json
import sqlite3
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from vllm.exceptions import RetryableRequestError

from inducekv_vllm.bundle import sign_digest, with_metadata, write_bundle
from inducekv_vllm.errors import BundleError, ConfigError, UnknownBundle, VersionConflict
from inducekv_vllm.files.audit_chain import read, verify
from inducekv_vllm.vllm_seams.config import InduceKVConfig
from server.journal import STRANGERS
from server.registry import BundleRegistry
from server.state import StateError
from tests.bundles import random_bundle
from tests.server.registries import BUNDLES, DIGEST, RUN, Workers, begin, end, write_all

pytestmark = pytest.mark.anyio
ADMIN = "admin at 10.0.0.7"
TRACE = {
    "bundle": "m",
    "digest": "d",
    "gate": {"open": True, "task": "t", "closed": None, "margins": {}},
    "entries": [{"index": 3, "id": "x", "task": "t", "weight": 0.25}],
    "facts": [{"id": "y", "task": "t", "closeness": 0.98, "withheld": None}],
    "shared": None,
}


class Audited:
    """A registry with a state file."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.folder, self.path = folder, folder / "state"
        self.workers = Workers()
        self.registry: BundleRegistry = begin(InduceKVConfig(state=str(self.path), **settings), self.workers)

    async def load(self, content: str, **options: Any) -> None:
        await self.registry.load("m", str(self.folder / f"{content}.safetensors"), replace=True, who=ADMIN, **options)

    async def released(self) -> None:
        await self.registry.versions.follow()
        while self.registry.versions.background:
            await asyncio.gather(*self.registry.versions.background)

    def records(self) -> list[dict[str, Any]]:
        verify(self.path)
        return [json.loads(record) for _, record in read(self.path)]

    def events(self) -> list[str]:
        return [record["event"] for record in self.records()]

    def copies(self) -> set[str]:
        with contextlib.closing(sqlite3.connect(self.folder / "state")) as found:
            return {digest for (digest,) in found.execute("SELECT digest FROM contents WHERE bundle IS NOT NULL")}

    async def close(self) -> None:
        await end(self.registry)


@pytest.fixture
def files(tmp_path: Path) -> Path:
    return write_all(tmp_path, BUNDLES)


async def test_every_change_is_recorded(files: Path) -> None:
    server = Audited(files)
    await server.registry.start(RUN, "0123456789abcdef")
    for content in ("a", "b"):
        await server.load(content)
    await server.registry.rollback("m", who=ADMIN)
    with pytest.raises(VersionConflict):
        await server.registry.unload("m", expected_digest=DIGEST["c"], who=ADMIN)
    await server.registry.forget("m", who=ADMIN)
    await server.registry.unload("m", who=ADMIN)
    await server.released()
    records = server.records()
    assert [(r["event"], r.get("name"), r.get("by")) for r in records if r["event"] != "release"] == [
        ("start", None, None),
        ("load", "m", ADMIN),
        ("replace", "m", ADMIN),
        ("rollback", "m", ADMIN),
        ("refusal", "m", ADMIN),
        ("forget", "m", ADMIN),
        ("unload", "m", ADMIN),
    ]
    start, load, exchange, *_ = records
    assert start["admin_key"] == "0123456789abcdef"
    details = {"digest": DIGEST["a"], "parent": None, "before": None, "source": str(files / "a.safetensors")}
    assert {name: load[name] for name in details} == details
    assert exchange["before"] == DIGEST["a"]
    assert next(r for r in records if r["event"] == "refusal")["change"] == "unload"
    assert next(r for r in records if r["event"] == "forget")["digests"] == [DIGEST["b"]]
    assert {r["digest"] for r in records if r["event"] == "release"} == {DIGEST["a"], DIGEST["b"]}
    await server.close()


async def test_a_change_that_cannot_be_recorded_does_not_happen(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The change and its record are one transaction."""
    server = Audited(files)
    await server.load("a")
    before, copies = server.registry.shown(), server.copies()

    def full(*_: Any) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    with monkeypatch.context() as patch:
        patch.setattr("server.state.audit_chain.append", full)
        for change in (server.load("b"), server.registry.unload("m"), server.registry.forget("m")):
            with pytest.raises(StateError, match="cannot record this; nothing changed: database or disk is full"):
                await change
        with pytest.raises(StateError):
            await server.registry.journal.record_answer("r", "", TRACE)
    await server.released()
    assert (server.registry.shown(), server.copies()) == (before, copies)
    assert set(server.workers.resident) == {DIGEST["a"]}
    await server.load("b")
    assert server.events() == ["load", "replace"]


async def test_wrong_keys_do_not_fill_the_chain(files: Path) -> None:
    """The first few are recorded, and later how many more there were; the admin's refusals are recorded each."""
    server = Audited(files)
    for _ in range(1000):
        await server.registry.journal.note_stranger("/v1/load_memory_bundle", "10.0.0.9", "found another key")
    with pytest.raises(UnknownBundle):
        await server.registry.unload("m", who=ADMIN)
    server.registry.journal._strangers.clear()  # a minute later
    await server.registry.journal.note_stranger("/v1/load_memory_bundle", "10.0.0.9", "found another key")
    refused = [record.get("unrecorded_before") for record in server.records() if record["event"] == "refusal"]
    assert refused == [*[0] * STRANGERS, None, 1000 - STRANGERS]


async def test_forgetting_names_a_version_that_is_used_elsewhere_and_drops_it_later(files: Path) -> None:
    """Under another name, or by a request that runs."""
    server = Audited(files)
    await server.load("a")
    with pytest.raises(ConfigError, match="stands for the version"):
        await server.registry.forget("m", digest=DIGEST["a"])
    await server.registry.journal.put_trace("owner", None, "r", {"digest": DIGEST["a"]})
    with server.registry.lease("m"):
        await server.load("b")
        assert (await server.registry.forget("m")).in_use == [DIGEST["a"]]
        await server.registry.load("n", str(files / "a.safetensors"))
    await server.released()
    assert server.copies() == {DIGEST["a"], DIGEST["b"]}
    assert await server.registry.journal.traces("owner", None, "r")
    await server.registry.unload("n")
    await server.released()
    assert server.copies() == {DIGEST["b"]}
    assert not await server.registry.journal.traces("owner", None, "r")


class TestSignatures:
    @pytest.fixture
    def keys(self, files: Path) -> dict[str, Ed25519PrivateKey]:
        keys = {name: Ed25519PrivateKey.from_private_bytes(name.encode() * 16) for name in ("k1", "k2")}
        for name, key in keys.items():
            pem = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
            (files / f"{name}.pem").write_bytes(pem)
        return keys

    def signed(self, files: Path, name: str, key: Ed25519PrivateKey) -> None:
        bundle = BUNDLES[name]
        write_bundle(replace(bundle, signature=sign_digest(bundle.digest, key)), files / f"{name}.safetensors")

    async def test_only_signed_bundles_are_served(self, files: Path, keys: dict[str, Ed25519PrivateKey]) -> None:
        server = Audited(files, require_signature=[str(files / "k1.pem")])
        with pytest.raises(BundleError, match="the bundle is not signed"):
            await server.load("a")
        self.signed(files, "a", keys["k2"])
        with pytest.raises(BundleError, match=r"is signed by the key .*, expected"):
            await server.load("a")
        assert server.registry.shown().data == []
        assert server.copies() == set()
        self.signed(files, "a", keys["k1"])
        await server.load("a")
        assert server.events() == ["refusal", "refusal", "load"]

    async def test_the_copy_is_checked_again_after_a_restart(
        self, files: Path, keys: dict[str, Ed25519PrivateKey], caplog: pytest.LogCaptureFixture
    ) -> None:
        """A copy that was stored without a signature gets the one that its content is loaded with later."""
        server = Audited(files)
        await server.load("a")
        await server.close()
        server = Audited(files, require_signature=[str(files / "k1.pem")])
        await server.registry.start(RUN)
        with pytest.raises(RetryableRequestError, match="cannot be loaded now"):
            await server.registry.bring("m")
        assert "not signed" in caplog.text
        await server.close()
        server = Audited(files)
        await server.registry.start(RUN)
        self.signed(files, "a", keys["k1"])
        await server.load("a")
        await server.close()
        server = Audited(files, require_signature=[str(files / "k2.pem"), str(files / "k1.pem")])
        await server.registry.start(RUN)
        await server.registry.bring("m")
        assert server.registry.shown().data[0].is_resident


async def test_expired_entries_are_loaded_but_counted(files: Path) -> None:
    bundle = random_bundle()
    past, later = (datetime.now(UTC).replace(microsecond=0) + timedelta(days=days) for days in (-1, 1))
    dates = [past, past, later, None, None]
    old = bundle.metadata.entries
    entries = [entry.model_copy(update={"expires_at": date}) for entry, date in zip(old, dates, strict=True)]
    write_bundle(with_metadata(bundle, entries=tuple(entries)), files / "e.safetensors")
    server = Audited(files)
    await server.load("e")
    (card,) = server.registry.shown().data
    assert (card.entries, card.expired_entries) == (5, 2)


async def test_what_an_answer_was_made_of_is_recorded(files: Path) -> None:
    server = Audited(files, audit_answers=True)
    await server.registry.journal.record_answer("chatcmpl-1", "f" * 64, TRACE)
    (record,) = server.records()
    del record["time"], record["previous"]
    details = {
        "request": "chatcmpl-1",
        "by": "f" * 16,
        "name": "m",
        "digest": "d",
        "task": "t",
        "entries": {"x": 0.25, "y": 1.0},
    }
    assert record == {"n": 0, "event": "answer", **details}
