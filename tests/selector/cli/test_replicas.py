"""`inducekv-bundle publish` with several servers, of which some refuse, are not there, or serve something else."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from inducekv_vllm.bundle import write_bundle
from inducekv_vllm.host.config import ADMIN_HEADER, ADMIN_KEY_VARIABLE
from selector.cli.bundle import main
from tests.inducekv_vllm.bundles import random_bundle

OLD, NEW = random_bundle(2, 3, seed=1), random_bundle(2, 3, seed=2)
NOBODY = "http://127.0.0.1:9"


class FakeServer:
    """One name and its digest, behind an admin key."""

    def __init__(self, served: str | None) -> None:
        self.served, self.loads = served, list[dict[str, Any]]()
        self.elsewhere: str | None = None  # where it redirects to
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                assert ADMIN_HEADER not in self.headers
                cards = [{"name": "m", "digest": server.served}] if server.served else []
                self.answer(200, {"data": cards})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                if server.elsewhere is not None:
                    self.send_response(307)
                    self.send_header("Location", f"{server.elsewhere}{self.path}")
                    self.end_headers()
                    return
                if self.headers[ADMIN_HEADER] != "key":
                    self.answer(401, {"error": {"message": "needs the admin key"}})
                    return
                if body.get("expected_digest") not in (None, server.served):
                    self.answer(409, {"error": {"message": "found another"}})
                    return
                server.loads.append(body)
                server.served = NEW.digest
                self.answer(200, {"name": body["name"], "digest": server.served})

            def answer(self, status: int, body: dict[str, Any]) -> None:
                self.send_response(status)
                self.end_headers()
                self.wfile.write(json.dumps(body).encode())

            def log_message(self, *_: Any) -> None: ...

        self.http = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        self.thread = threading.Thread(target=self.http.serve_forever)
        self.thread.start()

    def stop(self) -> None:
        self.http.shutdown()
        self.http.server_close()
        self.thread.join()


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[FakeServer]]:
    """One that serves the old version, one that serves the new one, one that serves nothing."""
    monkeypatch.setenv(ADMIN_KEY_VARIABLE, "key")
    made = [FakeServer(OLD.digest), FakeServer(NEW.digest), FakeServer(None)]
    yield made
    for server in made:
        server.stop()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    write_bundle(NEW, tmp_path / "m.safetensors")
    return tmp_path / "m.safetensors"


def to(*servers: FakeServer | str) -> list[str]:
    urls = [server if isinstance(server, str) else server.url for server in servers]
    return [part for url in urls for part in ("--to", url)]


def test_every_server_serves_the_new_version(
    servers: list[FakeServer], path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["publish", str(path), *to(*servers)]) == 0
    assert [server.served for server in servers] == 3 * [NEW.digest]
    assert [len(server.loads) for server in servers] == [1, 0, 1]
    assert servers[0].loads == [{"name": "m", "path": str(path), "replace": True}]
    old, new, nothing = capsys.readouterr().out.splitlines()
    assert old == f"{servers[0].url}: m was {OLD.digest}, is {NEW.digest}"
    assert new == f"{servers[1].url}: m was {NEW.digest}, is {NEW.digest}"
    assert nothing == f"{servers[2].url}: m was -, is {NEW.digest}"


def test_a_server_that_is_not_there_does_not_keep_the_others_from_it(
    servers: list[FakeServer], path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["publish", str(path), *to(NOBODY, servers[0])]) == 1
    assert servers[0].served == NEW.digest
    unknown, summary = capsys.readouterr().err.splitlines()
    assert unknown.startswith(f"{NOBODY}: what it serves is unknown: {NOBODY}/v1/memory_bundles cannot be reached")
    assert summary == f"1 of 2 servers do not serve {NEW.digest}: {NOBODY}"


def test_check_changes_nothing(servers: list[FakeServer], path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["publish", str(path), "--check", *to(*servers[:2])]) == 1
    assert f"m was {OLD.digest}, is {OLD.digest}" in capsys.readouterr().out
    assert main(["publish", str(path), "--check", *to(servers[1])]) == 0
    assert [server.loads for server in servers] == [[], [], []]


@pytest.mark.parametrize(("expected", "status"), [(OLD.digest, 0), (NEW.digest, 1)])
def test_compare_and_swap(servers: list[FakeServer], path: Path, expected: str, status: int) -> None:
    assert main(["publish", str(path), "--expected-digest", expected, *to(servers[0])]) == status


def test_without_the_key_the_server_says_why(
    servers: list[FakeServer], path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(ADMIN_KEY_VARIABLE)
    assert main(["publish", str(path), *to(servers[0])]) == 1
    shown = capsys.readouterr()
    assert "refused it (401): " in shown.err
    assert shown.out == f"{servers[0].url}: m was {OLD.digest}, is {OLD.digest}\n"


def test_keys_do_not_follow_a_redirect(
    servers: list[FakeServer], path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    servers[0].elsewhere = servers[2].url
    assert main(["publish", str(path), *to(servers[0])]) == 1
    assert servers[2].loads == []
    assert "refused it (307)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--to", "127.0.0.1:8000"], "--to must be an http or https address.* did you mean http://127.0.0.1:8000"),
        (["--to", "http://"], "--to must be an address such as http://127.0.0.1:8000"),
    ],
)
def test_wrong_addresses_are_refused_before_anything_is_sent(
    path: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    import re

    assert main(["publish", str(path), *arguments]) == 2
    assert re.search(message, capsys.readouterr().err)


def test_a_file_that_is_no_bundle_goes_to_no_server(servers: list[FakeServer], tmp_path: Path) -> None:
    (tmp_path / "m.safetensors").write_bytes(b"")
    assert main(["publish", str(tmp_path / "m.safetensors"), *to(*servers)]) == 2
    assert [server.loads for server in servers] == [[], [], []]
