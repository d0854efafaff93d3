"""What a registry records of its changes, which signatures it asks for, and what it forgets; the workers take all."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import sqlite3
import threading
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from inducekv_vllm.bundle import sign_digest, with_entries, write_bundle
from inducekv_vllm.errors import BundleError, ConfigError, UnknownBundle, VersionConflict
from inducekv_vllm.files.audit_chain import AuditWriter, verify
from inducekv_vllm.host.config import InduceKVConfig
from server.audit import WRONG_KEYS, AuditLog
from server.registry import BundleRegistry
from tests.bundles import random_bundle
from tests.server.test_versions import BUNDLES, DIGEST, RUN, Workers, begin, end

pytestmark = pytest.mark.anyio
ADMIN = "admin at 10.0.0.7"


class Audited:
    """A registry with a state file and an audit log."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.folder, self.log = folder, folder / "audit.jsonl"
        config = InduceKVConfig(state=str(folder / "state"), audit_log=str(self.log), **settings)
        self.workers = Workers()
        self.registry: BundleRegistry = begin(config, self.workers)
        answers = config.audit_answers
        self.audit = self.registry._audit = AuditLog(str(self.log), answers=answers, admin_key="the admin's key")

    async def load(self, content: str, **options: Any) -> None:
        await self.registry.load("m", str(self.folder / f"{content}.safetensors"), replace=True, who=ADMIN, **options)

    async def released(self) -> None:
        await self.registry.follow()
        while self.registry.background:
            await asyncio.gather(*self.registry.background)

    def records(self) -> list[dict[str, Any]]:
        verify(self.log)
        return [json.loads(line) for line in self.log.read_text().splitlines()]

    def events(self) -> list[str]:
        return [record["event"] for record in self.records()]

    def copies(self) -> set[str]:
        with contextlib.closing(sqlite3.connect(self.folder / "state")) as found:
            return {digest for (digest,) in found.execute("SELECT digest FROM contents WHERE bundle IS NOT NULL")}

    async def close(self) -> None:
        await end(self.registry)
        self.audit.close()


@pytest.fixture
def files(tmp_path: Path) -> Path:
    for name, bundle in BUNDLES.items():
        write_bundle(bundle, tmp_path / f"{name}.safetensors")
    return tmp_path


async def test_every_change_is_recorded(files: Path) -> None:
    server = Audited(files)
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
    assert start["admin_key"] not in (None, "the admin's key")
    assert len(start["admin_key"]) == 16
    facts = {"digest": DIGEST["a"], "parent": None, "before": None, "source": str(files / "a.safetensors")}
    assert {name: load[name] for name in facts} == facts
    assert exchange["before"] == DIGEST["a"]
    assert next(r for r in records if r["event"] == "refusal")["change"] == "unload"
    assert next(r for r in records if r["event"] == "forget")["digests"] == [DIGEST["b"]]
    assert {r["digest"] for r in records if r["event"] == "release"} == {DIGEST["a"], DIGEST["b"]}
    assert "the admin's key" not in server.log.read_text()


async def test_a_restart_goes_on_with_the_chain(files: Path) -> None:
    server = Audited(files)
    await server.load("a")
    await server.close()
    server.log.write_bytes(server.log.read_bytes() + b'{"n": 2, "time')  # it was killed while it wrote
    again = Audited(files)
    await again.registry.start(RUN)
    lines = again.log.read_bytes().splitlines()
    assert json.loads(lines[3])["previous"] == hashlib.sha256(b"\n".join(lines[1:3])).hexdigest()
    assert [json.loads(lines[row])["event"] for row in (0, 1, 3, 4)] == ["start", "load", "start", "restore"]
    verify(again.log)
    assert again.registry.shown().data[0].digest == DIGEST["a"]


async def test_a_change_that_cannot_be_recorded_does_not_happen(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = Audited(files, audit_answers=True)
    await server.load("a")
    before, copies = server.registry.shown(), server.copies()

    def full(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("inducekv_vllm.files.audit_chain.os.write", full)
        for change in (
            server.load("b"),
            server.registry.unload("m"),
            server.registry.forget("m"),
        ):
            with pytest.raises(ConfigError, match="cannot write the audit log: No space left"):
                await change
        with pytest.raises(ConfigError):
            await server.audit.answer("r", "", {"bundle": "m", "digest": "d", "gate": None, "entries": []})
    await server.released()
    assert (server.registry.shown(), server.copies()) == (before, copies)
    assert set(server.workers.resident) == {DIGEST["a"]}
    await server.load("b")
    verify(server.log)


async def test_wrong_keys_do_not_fill_the_log(files: Path) -> None:
    """The first few are recorded, and then how many more there were; the admin's refusals are recorded each."""
    server = Audited(files)
    for _ in range(1000):
        server.audit.refusal("/v1/load_memory_bundle", None, "unknown at 10.0.0.9", "found another key")
    with pytest.raises(UnknownBundle):
        await server.registry.unload("m", who=ADMIN)
    await server.close()
    refused = [record.get("count") for record in server.records() if record["event"] == "refusal"]
    assert refused == [None] * (WRONG_KEYS + 1) + [1000 - WRONG_KEYS]


class Disk:
    """A disk that answers when it is told to."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.asked, self.answers = threading.Event(), threading.Event()
        patch.setattr(AuditWriter, "sync", lambda _: self._wait())

    def _wait(self) -> None:
        self.asked.set()
        assert self.answers.wait(60)

    async def is_asked(self) -> None:
        while not self.asked.is_set():
            await asyncio.sleep(0.01)


async def test_a_change_waits_for_the_disk_and_requests_do_not(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = Audited(files, audit_answers=True)
    await server.load("a")
    disk = Disk(monkeypatch)
    change = asyncio.create_task(server.load("b"))
    await disk.is_asked()
    await server.audit.answer("r", "", {"bundle": "m", "digest": DIGEST["a"], "gate": None, "entries": []})
    await asyncio.sleep(0.05)
    assert not change.done()
    assert server.registry.shown().data[0].digest == DIGEST["a"]
    assert server.events()[-2:] == ["replace", "answer"]
    disk.answers.set()
    await change
    assert server.registry.shown().data[0].digest == DIGEST["b"]


async def test_forgetting_names_a_version_that_is_used_elsewhere_and_drops_it_later(files: Path) -> None:
    """Under another name, or by a request that runs."""
    server = Audited(files)
    await server.load("a")
    with pytest.raises(ConfigError, match="stands for the version"):
        await server.registry.forget("m", digest=DIGEST["a"])
    await server.registry.put_trace("owner", None, "r", {"digest": DIGEST["a"]})
    with server.registry.lease("m"):
        await server.load("b")
        assert (await server.registry.forget("m")).in_use == [DIGEST["a"]]
        await server.registry.load("n", str(files / "a.safetensors"))
    await server.released()
    assert server.copies() == {DIGEST["a"], DIGEST["b"]}
    assert await server.registry.traces("owner", None, "r")
    await server.registry.unload("n")
    await server.released()
    assert server.copies() == {DIGEST["b"]}
    assert not await server.registry.traces("owner", None, "r")


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
        assert server.events() == ["start", "refusal", "refusal", "load"]

    async def test_the_copy_is_checked_again_at_a_restart(
        self, files: Path, keys: dict[str, Ed25519PrivateKey]
    ) -> None:
        """A copy that was stored without a signature gets the one that its content is loaded with later."""
        server = Audited(files)
        await server.load("a")
        await server.close()
        server = Audited(files, require_signature=[str(files / "k1.pem")])
        with pytest.raises(BundleError, match="not signed"):
            await server.registry.start(RUN)
        await server.close()
        server = Audited(files)
        await server.registry.start(RUN)
        self.signed(files, "a", keys["k1"])
        await server.load("a")
        await server.close()
        server = Audited(files, require_signature=[str(files / "k2.pem"), str(files / "k1.pem")])
        await server.registry.start(RUN)
        assert server.registry.shown().data[0].digest == DIGEST["a"]


async def test_expired_entries_are_loaded_but_counted(files: Path) -> None:
    bundle = random_bundle()
    past, later = (datetime.now(UTC).replace(microsecond=0) + timedelta(days=days) for days in (-1, 1))
    dates = [past, past, later, None, None]
    old = bundle.metadata.entries
    entries = [entry.model_copy(update={"expires_at": date}) for entry, date in zip(old, dates, strict=True)]
    write_bundle(with_entries(bundle, tuple(entries)), files / "e.safetensors")
    server = Audited(files)
    await server.load("e")
    (card,) = server.registry.shown().data
    assert (card.entries, card.expired_entries) == (5, 2)


async def test_answers_are_recorded_only_if_asked_for(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They reach the disk when the log is closed, at the latest."""
    gate = {"open": True, "task": "t", "closed": None, "margins": {}}
    entries = [{"index": 3, "id": "x", "task": "t", "weight": 0.25}]
    trace = {"bundle": "m", "digest": "d", "gate": gate, "entries": entries}
    synced: list[int] = []
    monkeypatch.setattr(AuditWriter, "sync", lambda _: synced.append(1))
    for answers, expected in ((False, ["start"]), (True, ["start", "answer"])):
        log = AuditLog(str(files / f"{answers}.jsonl"), answers=answers)
        await log.answer("chatcmpl-1", "f" * 64, trace)
        log.close()
        assert len(synced) == 1 + answers  # the start is synced too
        synced.clear()
        records = [json.loads(line) for line in (files / f"{answers}.jsonl").read_text().splitlines()]
        assert [record["event"] for record in records] == expected
    del records[1]["time"], records[1]["previous"]
    facts = {"request": "chatcmpl-1", "by": "f" * 16, "name": "m", "digest": "d", "task": "t", "entries": {"x": 0.25}}
    assert records[1] == {"n": 1, "event": "answer", **facts}
