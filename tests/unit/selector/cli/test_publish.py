"""`inducekv-bundle publish` with several servers, of which some refuse, are not there, or serve something else."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from inducekv_vllm.bundle import write_bundle
from inducekv_vllm.vllm_seams.config import ADMIN_HEADER, ADMIN_KEY_VARIABLE
from selector.cli.bundle import main
from tests.bundles import random_bundle
from tests.unit.selector.imitated import Request, imitated_server

OLD, NEW = random_bundle(2, 3, seed=1), random_bundle(2, 3, seed=2)
NOBODY = "http://127.0.0.1:9"


class FakeServer:
    """One name and its digest, behind an admin key."""

    url: str

    def __init__(self, served: str | None) -> None:
        self.served, self.loads = served, list[dict[str, Any]]()
        self.elsewhere: str | None = None  # where it redirects to

    def answer(self, request: Request) -> tuple[int, Any]:
        if request.body is None:
            assert ADMIN_HEADER not in request.headers
            if not self.served:
                return 404, {"error": {"message": "no memory bundle 'm' is loaded"}}
            return 200, {"name": "m", "digest": self.served}
        if self.elsewhere is not None:
            return 307, f"{self.elsewhere}{request.path}"
        if request.headers[ADMIN_HEADER] != "key":
            return 401, {"error": {"message": "needs the admin key"}}
        if request.body.get("expected_digest") not in (None, self.served):
            return 409, {"error": {"message": "found another"}}
        self.loads.append(request.body)
        self.served = NEW.digest
        return 200, {"name": request.body["name"], "digest": self.served}


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[FakeServer]]:
    """One that serves the old version, one that serves the new one, one that serves nothing."""
    monkeypatch.setenv(ADMIN_KEY_VARIABLE, "key")
    made = [FakeServer(OLD.digest), FakeServer(NEW.digest), FakeServer(None)]
    with ExitStack() as running:
        for server in made:
            server.url = running.enter_context(imitated_server(server.answer))
        yield made


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
    assert unknown.startswith(f"{NOBODY}: what it serves is unknown: {NOBODY}/v1/memory_bundles/m cannot be reached")
    assert summary == f"1 of 2 servers do not serve {NEW.digest}: {NOBODY}"


def test_check_changes_nothing(servers: list[FakeServer], path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["publish", str(path), "--check", *to(*servers[:2])]) == 1
    assert f"m was {OLD.digest}, is {OLD.digest}" in capsys.readouterr().out
    assert main(["publish", str(path), "--check", *to(servers[1])]) == 0
    assert [server.loads for server in servers] == [[], [], []]


def test_keys_do_not_follow_a_redirect(
    servers: list[FakeServer], path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    servers[0].elsewhere = servers[2].url
    assert main(["publish", str(path), *to(servers[0])]) == 1
    assert servers[2].loads == []
    assert "refused it (307)" in capsys.readouterr().err


@pytest.mark.parametrize(("expected", "status"), [(OLD.digest, 0), (NEW.digest, 1)])
def test_compare_and_swap(servers: list[FakeServer], path: Path, expected: str, status: int) -> None:
    assert main(["publish", str(path), "--expected-digest", expected, *to(servers[0])]) == status
