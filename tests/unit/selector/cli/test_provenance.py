"""`inducekv-bundle forget`, `sign`, `verify --public-key` and `audit` from the command line."""

import contextlib
import json
import sqlite3
import subprocess
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from inducekv_vllm.bundle import Bundle, read_bundle, with_metadata
from inducekv_vllm.files import audit_chain
from tests.bundles import random_bundle, random_gated_bundle
from tests.unit.selector.cli.bundle_command import command, refuse, written

NOW = datetime.now(UTC).replace(microsecond=0)


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """Tasks a and b; entry i was made i days ago, e0 has expired, and e4 expires in a day."""
    return written(_dated(random_gated_bundle()), tmp_path / "old.safetensors")


def _dated(bundle: Bundle) -> Bundle:
    expiry = {"e0": NOW, "e4": NOW + timedelta(days=1)}
    return with_metadata(
        bundle,
        entries=tuple(
            entry.model_copy(
                update={"created_at": NOW - timedelta(days=i, hours=1), "expires_at": expiry.get(entry.id)}
            )
            for i, entry in enumerate(bundle.metadata.entries)
        ),
    )


def ids(path: Path) -> list[str]:
    return [entry.id for entry in read_bundle(path).metadata.entries]


@pytest.mark.parametrize(
    ("flags", "left"),
    [
        (("--entry", "e1", "--entry", "e3"), ["e0", "e2", "e4"]),
        (("--task", "b"), ["e0", "e1", "e3"]),
        (("--entry", "e0", "--task", "b"), ["e1", "e3"]),
    ],
)
def test_forget(old: Path, tmp_path: Path, flags: tuple[str, ...], left: list[str]) -> None:
    before, new = old.read_bytes(), tmp_path / "new.safetensors"
    printed = command("forget", old, *flags, "--output", new)
    after = read_bundle(new)
    assert ids(new) == left
    assert after.metadata.parent_digest == read_bundle(old).digest
    assert f"{len(left)} entries, {5 - len(left)} forgotten" in printed
    assert after.digest in printed
    is_b_gone = not {"e2", "e4"} & set(left)
    assert f"tasks gone: {'b' if is_b_gone else 'none'}" in printed
    assert after.metadata.gate_tasks == (("a",) if is_b_gone else ("a", "b"))
    assert old.read_bytes() == before


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ((), "say what to forget"),
        (("--task", "a", "--task", "b"), "all 5 entries would be forgotten"),
    ],
)
def test_what_is_refused_leaves_nothing(old: Path, tmp_path: Path, flags: tuple[str, ...], problem: str) -> None:
    assert problem in refuse("forget", old, *flags, "--output", tmp_path / "new.safetensors")
    assert [path.name for path in tmp_path.iterdir()] == ["old.safetensors"]


def test_inspect_shows_dates(old: Path, tmp_path: Path) -> None:
    printed = command("inspect", old, "--entries")
    assert f"2 entries, the first at {NOW:%Y-%m-%dT%H:%M:%SZ}; 1 have expired" in printed
    assert f"e4\tb\tab\t{NOW - timedelta(days=4, hours=1):%Y-%m-%dT%H:%M:%SZ}\t" in printed
    plain = command("inspect", written(random_bundle(), tmp_path / "plain.safetensors"), "--entries")
    assert "expire " not in plain
    assert "e4\tt\tab\t-\t-" in plain


def test_sign_and_verify(old: Path, tmp_path: Path) -> None:
    for name in ("ours", "theirs"):
        key, shared = tmp_path / f"{name}.pem", tmp_path / f"{name}.pub"
        subprocess.run(["openssl", "genpkey", "-algorithm", "ed25519", "-out", key], check=True)
        subprocess.run(["openssl", "pkey", "-in", key, "-pubout", "-out", shared], check=True)
    digest = read_bundle(old).digest
    assert "is not signed" in refuse("verify", old, "--public-key", tmp_path / "ours.pub")
    assert "signed by       nobody" in command("inspect", old)
    assert digest in command("sign", old, "--key", tmp_path / "ours.pem")
    assert digest in command("verify", old, "--public-key", tmp_path / "ours.pub")
    assert "is signed by the key" in refuse("verify", old, "--public-key", tmp_path / "theirs.pub")
    both = ("--public-key", tmp_path / "theirs.pub", "--public-key", tmp_path / "ours.pub")
    assert digest in command("verify", old, *both)
    assert "not a private key" in refuse("sign", old, "--key", tmp_path / "ours.pub")

    command("forget", old, "--entry", "e0", "--output", tmp_path / "next.safetensors")
    assert "is not signed" in refuse("verify", tmp_path / "next.safetensors", "--public-key", tmp_path / "ours.pub")


def test_audit(tmp_path: Path) -> None:
    path = tmp_path / "state"
    with contextlib.closing(sqlite3.connect(path)) as rows, rows:
        rows.execute(audit_chain.TABLE)
        for event in ("start", "load", "unload"):
            audit_chain.append(rows, event, {})
    _, head = audit_chain.verify(path)
    assert command("audit", path) == f"{path}: 3 records, head {head}\n"
    command("audit", path, "--head", head)
    shown = command("audit", path, "--show").splitlines()
    assert [json.loads(line)["event"] for line in shown] == ["start", "load", "unload"]
    with contextlib.closing(sqlite3.connect(path)) as rows, rows:
        rows.execute("""UPDATE audit SET record = replace(record, '"load"', '"lord"')""")
    assert f"{path}: record 2 of the audit chain does not follow record 1" in refuse("audit", path)
    assert "no such file" in refuse("audit", tmp_path / "none")
