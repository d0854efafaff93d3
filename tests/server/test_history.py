"""The versions of names in their folder: what is kept, whose files are left alone, and what a failure leaves behind."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from inducekv_vllm.bundle import Bundle, write_bundle
from inducekv_vllm.errors import ConfigError
from server.history import History, VersionRecord
from tests.bundles import random_bundle

BUNDLES = [random_bundle(seed=seed) for seed in range(5)]


def push(history: History, name: str, bundle: Bundle) -> VersionRecord:
    path = history.store(bundle, "/somewhere/b.safetensors")
    record = history.record(bundle.digest, None, "admin", "/somewhere/b.safetensors", path)
    history.push(name, record)
    return record


def digests(history: History, name: str) -> list[int]:
    """The versions of a name, as positions in `BUNDLES`."""
    numbers = {bundle.digest: number for number, bundle in enumerate(BUNDLES)}
    return [numbers[record.digest] for record in history.of(name)]


@pytest.mark.parametrize("on_disk", [False, True])
def test_the_last_versions_are_kept_and_the_served_one_is_first(tmp_path: Path, on_disk: bool) -> None:
    history = History(str(tmp_path / "state") if on_disk else None, keep=3)
    for bundle in BUNDLES:
        push(history, "m", bundle)
    assert digests(history, "m") == [4, 3, 2]
    push(history, "m", BUNDLES[2])
    assert digests(history, "m") == [2, 4, 3]
    push(history, "n", BUNDLES[0])
    history.drop("m")
    assert history.names == ("n",)
    assert history.of("m") == ()


def test_what_a_killed_server_left_unfinished_is_removed(tmp_path: Path) -> None:
    history = History(str(tmp_path))
    push(history, "m", BUNDLES[0])
    history.store(BUNDLES[1], "/b")  # was never recorded
    (tmp_path / ".registry.json.0123456789abcdef.tmp").write_text("{")
    (tmp_path / f".{BUNDLES[2].digest}.safetensors.0123456789abcdef.tmp").write_text("")
    history.close()
    again = History(str(tmp_path))
    assert digests(again, "m") == [0]
    assert set(os.listdir(tmp_path)) == {"lock", "registry.json", f"{BUNDLES[0].digest}.safetensors"}


@pytest.mark.parametrize("name", ["notes.txt", "model.safetensors", ".swp.tmp", "registry.json.bak"])
def test_a_folder_of_somebody_else_is_refused_and_left_as_it_is(tmp_path: Path, name: str) -> None:
    write_bundle(BUNDLES[0], tmp_path / name)
    content = (tmp_path / name).read_bytes()
    with pytest.raises(ConfigError, match=f"expected an empty folder, or that of an earlier server, found '{name}'"):
        History(str(tmp_path))
    assert os.listdir(tmp_path) == [name]
    assert (tmp_path / name).read_bytes() == content


def test_what_no_server_has_written_stays_in_its_folder(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    history = History(str(tmp_path), keep=1)
    push(history, "m", BUNDLES[0])
    history.close()
    (tmp_path / "folder.safetensors").mkdir()
    (tmp_path / ("0" * 64 + ".safetensors")).mkdir()
    (tmp_path / ".editor.tmp").write_text("mine")
    (tmp_path / ("1" * 64 + ".safetensors")).write_text("no bundle")
    write_bundle(BUNDLES[1], tmp_path / "mine.safetensors")
    write_bundle(BUNDLES[1], tmp_path / ("2" * 64 + ".safetensors"))  # not what its name says
    before = set(os.listdir(tmp_path))
    again = History(str(tmp_path), keep=1)
    assert set(os.listdir(tmp_path)) == before
    assert [message for message in caplog.messages if "folder.safetensors" in message and "left alone" in message]
    push(again, "m", BUNDLES[2])  # and what was served goes
    added, gone = f"{BUNDLES[2].digest}.safetensors", f"{BUNDLES[0].digest}.safetensors"
    assert set(os.listdir(tmp_path)) == before - {gone} | {added}


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_change_that_cannot_be_recorded_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    history = History(str(tmp_path))
    push(history, "m", BUNDLES[0])
    record = history.record(BUNDLES[1].digest, None, "admin", "/b", history.store(BUNDLES[1], "/b"))
    before = (tmp_path / "registry.json").read_bytes()

    def fail(*arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail)
        for change in (lambda: history.push("m", record), lambda: history.drop("m")):
            with pytest.raises(ConfigError, match=r"registry.json: cannot write the registry: No space left"):
                change()
    assert digests(history, "m") == [0]
    assert (tmp_path / "registry.json").read_bytes() == before
    history.push("m", record)
    assert digests(history, "m") == [1, 0]


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("", "the file: Invalid JSON"),
        ("{", "the file: Invalid JSON"),
        ("[]", "the file: Input should be an object"),
        (json.dumps({"format_version": 2}), "format_version: Input should be 1"),
        (json.dumps({"names": {"m": [{"digest": "../../etc/passwd"}]}}), "names.m.0.digest: String should match"),
        (json.dumps({"names": {"m": []}}), "names.m: Tuple should have at least 1 item"),
    ],
)
def test_a_registry_that_cannot_be_read_is_named(tmp_path: Path, content: str, problem: str) -> None:
    (tmp_path / "registry.json").write_text(content)
    expected = f"registry.json: the registry of an earlier server cannot be read: {problem}"
    with pytest.raises(ConfigError, match=re.escape(expected)):
        History(str(tmp_path))
    assert (tmp_path / "registry.json").read_text() == content
