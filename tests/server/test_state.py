"""The state file of a server: what is kept, whose files are left alone, and what a failure leaves behind."""

import contextlib
import os
import sqlite3
import threading
from datetime import UTC, datetime
from pathlib import Path

import pytest

from inducekv_vllm.bundle import Bundle, FactRecord, with_metadata, write_bundle
from inducekv_vllm.errors import CapacityError, ConfigError
from inducekv_vllm.frontend.served_bundle import ServedBundle
from server.state import Pointed, ServerState, VersionRecord, check_state_file
from tests.bundles import random_bundle

BUNDLES = [random_bundle(seed=seed) for seed in range(5)]


def content_of(bundle: Bundle) -> bytes:
    return b"content of " + bundle.digest.encode()


def point(state: ServerState, name: str, bundle: Bundle, keep: int = 3, nbytes: int = 1) -> None:
    record = VersionRecord(name, bundle.digest, None, datetime.now(UTC), "admin", "/somewhere/b.safetensors")
    content = content_of(bundle) if state.keeps_bundles else None
    memory = ServedBundle(bundle.metadata, "/somewhere/b.safetensors", 1)
    state.point(Pointed(record, memory, "load", nbytes, content, keep))


def digests(state: ServerState, name: str) -> list[int]:
    """The versions of a name, as positions in `BUNDLES`."""
    numbers = {bundle.digest: number for number, bundle in enumerate(BUNDLES)}
    return [numbers[record.digest] for record in state.records(name)]


def contents(path: Path) -> set[str]:
    with contextlib.closing(sqlite3.connect(path)) as found:
        return {digest for (digest,) in found.execute("SELECT digest FROM contents")}


def test_the_last_versions_are_kept_and_the_served_one_is_first(tmp_path: Path) -> None:
    state = ServerState(tmp_path / "state", keeps_bundles=True)
    for bundle in BUNDLES:
        point(state, "m", bundle)
        state.release(state.records("m")[-1].digest)
    assert digests(state, "m") == [4, 3, 2]
    point(state, "m", BUNDLES[2])
    assert digests(state, "m") == [2, 4, 3]
    assert state.page("", 9) == [("m", BUNDLES[2].digest)]
    point(state, "n", BUNDLES[0])
    assert state.unload("m", "admin") == BUNDLES[2].digest
    assert (state.page("", 9), state.records("m")) == ([("n", BUNDLES[0].digest)], ())


def test_nothing_is_left_of_what_is_forgotten(tmp_path: Path) -> None:
    path, secret = tmp_path / "state", BUNDLES[0].digest
    state = ServerState(path, keeps_bundles=True)
    for bundle in BUNDLES[:2]:
        point(state, "m", bundle)
    state.put_trace("owner", None, "r", {"digest": secret, "entry": "of the trace"})
    state.put_trace(
        "owner", None, "s", {"digest": BUNDLES[1].digest, "shared": {"digest": secret, "entry": "of the trace"}}
    )
    other = ServerState(path, keeps_bundles=True, process=1)
    assert other.hold(secret)
    assert state.forget("m", [secret], "admin") == [secret]  # its last request runs
    assert not state.release(secret)
    other.end_hold(secret)
    assert state.release(secret)
    assert not state.release(secret)
    assert contents(path) == {BUNDLES[1].digest}
    assert state.traces("owner", None, "r") == state.traces("owner", None, "s") == []
    for left in tmp_path.iterdir():
        for of_it in (content_of(BUNDLES[0]), b"of the trace"):  # the audit chain keeps its digest
            assert of_it not in left.read_bytes(), left.name


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda path: path.mkdir(), "a state file is expected, and this is no file"),
        (lambda path: write_bundle(BUNDLES[0], path), "file is not a database"),
        (lambda path: path.write_text("notes"), "file is not a database"),
        (lambda path: other(path, 0), "this is the database of another application"),
        (lambda path: other(path, 0x494B5653), "a state file of version 2 is expected, found version 7"),
    ],
)
def test_what_is_no_state_file_is_refused_and_left_as_it_is(tmp_path: Path, make: object, problem: str) -> None:
    path = tmp_path / "state"
    make(path)  # type: ignore[operator]
    before = path.read_bytes() if path.is_file() else None
    with pytest.raises(ConfigError, match=problem):
        ServerState(path, keeps_bundles=True)
    assert os.listdir(tmp_path) == ["state"]
    assert before is None or path.read_bytes() == before


def other(path: Path, application: int) -> None:
    with contextlib.closing(sqlite3.connect(path)) as database:
        database.executescript(
            f"CREATE TABLE mine (x); PRAGMA application_id = {application}; PRAGMA user_version = 7;"
        )


def test_a_file_that_a_killed_server_has_only_begun_is_begun_again(tmp_path: Path) -> None:
    with contextlib.closing(sqlite3.connect(tmp_path / "state")) as database:
        database.execute("PRAGMA journal_mode = WAL")
    point(ServerState(tmp_path / "state", keeps_bundles=False), "m", BUNDLES[0])


def test_a_process_may_look_while_the_first_one_begins_the_file(tmp_path: Path) -> None:
    found: list[ConfigError] = []

    def look(path: Path) -> None:
        try:
            while not check_state_file(path):
                pass
        except ConfigError as error:
            found.append(error)

    for number in range(20):
        path = tmp_path / str(number)
        others = [threading.Thread(target=look, args=(path,)) for _ in range(3)]
        for other_process in others:
            other_process.start()
        ServerState(path, keeps_bundles=False).close()
        for other_process in others:
            other_process.join()
    assert not found


def test_one_server_uses_it_at_a_time(tmp_path: Path) -> None:
    first = ServerState(tmp_path / "state", keeps_bundles=True)
    with pytest.raises(ConfigError, match="another server uses this state file"):
        ServerState(tmp_path / "state", keeps_bundles=True)
    second = ServerState(tmp_path / "state", keeps_bundles=True, process=1)  # of the same server
    first.close()
    ServerState(tmp_path / "state", keeps_bundles=True)
    second.close()


def test_a_full_disk_changes_nothing(tmp_path: Path) -> None:
    state = ServerState(tmp_path / "state", keeps_bundles=True)
    point(state, "m", BUNDLES[0])
    state._durable.execute("PRAGMA max_page_count = 24")
    large = BUNDLES[1]
    with pytest.raises(CapacityError, match=r"the state file cannot record this; nothing changed: .*full"):
        state.point(
            Pointed(
                VersionRecord("m", large.digest, None, datetime.now(UTC), "admin", "/b"),
                ServedBundle(large.metadata, "/b", 1),
                *("load", 1, bytes(10**6), 3),
            )
        )
    assert digests(state, "m") == [0]
    assert list(state.snapshot().resident) == [BUNDLES[0].digest]


def test_a_place_that_cannot_be_written_is_refused() -> None:
    with pytest.raises(ConfigError, match="/proc/state: cannot be used as a state file: "):
        ServerState("/proc/state", keeps_bundles=True)


def test_when_facts_have_answered(tmp_path: Path) -> None:
    """Kept over a restart; nothing is left of facts and names that are gone."""
    state = ServerState(tmp_path / "state", keeps_bundles=True)
    for name in ("m", "n"):
        point(state, name, BUNDLES[0])
    state.note_uses({("m", "a"): 3.0, ("m", "b"): 2.0, ("n", "a"): 1.0, ("gone", "a"): 1.0})
    state.note_uses({("m", "a"): 2.5, ("m", "b"): 4.0})
    assert (state.uses("m"), state.uses("n"), state.uses("gone")) == ({"a": 3.0, "b": 4.0}, {"a": 1.0}, {})
    left = tuple(FactRecord(id=id, task="t", source_digest="0", question=id, answer="yes") for id in "bc")
    point(state, "m", with_metadata(BUNDLES[0], facts=left))
    state.unload("n", "admin")
    state.close()
    again = ServerState(tmp_path / "state", keeps_bundles=True)
    again.begin({})
    assert (again.uses("m"), again.uses("n")) == ({"b": 4.0}, {})


def test_a_trace_is_found_by_its_owner_alone_and_never_overwritten(tmp_path: Path) -> None:
    state = ServerState(tmp_path / "state", keeps_bundles=False)
    for owner, salt, response, of in (
        ("alice", None, "chatcmpl-1", "alice"),
        ("bob", None, "chatcmpl-1", "bob"),
        ("alice", None, "chatcmpl-1", "mallory"),
        ("alice", "salt", "chatcmpl-1", "salted"),
        ("bob", None, "cmpl-2-0", "first"),
        ("bob", None, "cmpl-2-1", "second"),
    ):
        state.put_trace(owner, salt, response, {"digest": "d", "of": of})

    def found(owner: str, salt: str | None, response: str) -> list[str]:
        return [trace["of"] for trace in state.traces(owner, salt, response)]

    assert found("alice", None, "chatcmpl-1") == ["alice"]
    assert found("bob", None, "chatcmpl-1") == ["bob"]
    assert found("alice", "salt", "chatcmpl-1") == ["salted"]
    assert found("bob", None, "cmpl-2") == ["first", "second"]
    for owner, salt in (("carol", None), ("bob", "salt"), ("", None)):
        assert found(owner, salt, "chatcmpl-1") == []


def test_a_version_that_a_process_uses_does_not_leave_the_pool(tmp_path: Path) -> None:
    """Nor is it used while it leaves. The lock of a process that is killed ends with it."""
    first = ServerState(tmp_path / "state", keeps_bundles=False)
    second = ServerState(tmp_path / "state", keeps_bundles=False, process=1)
    for name, bundle in zip("mn", BUNDLES[:2], strict=True):
        point(first, name, bundle)
    used, unused = (bundle.digest for bundle in BUNDLES[:2])
    assert second.hold(used)
    assert (first.evict(used), first.evict(unused)) == (False, True)
    assert not second.hold(unused)
    with second._unused(unused):
        assert not first.hold(unused)
    first.bring(unused, 1)
    assert first.hold(unused)
    assert second.begin_leaving(unused)  # it waits for the requests that run
    assert (first.is_leaving(unused), second.is_leaving(unused), first.begin_leaving(unused)) == (True, False, False)
    first.end_hold(unused)
    assert not first.hold(unused)
    second.close()  # as a kill does
    assert first.hold(unused)
    assert first.evict(used)


def test_what_is_of_the_running_server_alone_does_not_wait_for_the_disk(tmp_path: Path) -> None:
    state = ServerState(tmp_path / "state", keeps_bundles=False)
    flushed = state._durable.total_changes
    state.put_trace("owner", None, "r", {"digest": BUNDLES[0].digest})
    assert state.traces("owner", None, "r") == [{"digest": BUNDLES[0].digest}]
    assert state._durable.total_changes == flushed
