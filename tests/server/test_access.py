"""Who may change bundles, from where, and whose traces are whose."""

import os
import re
from http import HTTPStatus
from pathlib import Path

import httpx
import openai
import pytest

from inducekv_vllm.bundle import write_bundle
from inducekv_vllm.errors import BundleError
from inducekv_vllm.vllm_seams.config import InduceKVConfig
from server.access import Access, ChangeRefused, stable_path
from tests.bundles import random_bundle
from tests.engine.parity import World, prompts
from tests.server.http import TRACED, Bundles, ask, trace_at, trace_of, wait_until
from tests.server.registries import Workers, begin


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "root" / "sub").mkdir(parents=True)
    (tmp_path / "outside").mkdir()
    for folder in ("root", "root/sub", "outside"):
        write_bundle(random_bundle(), tmp_path / folder / "b.safetensors")
    return tmp_path / "root"


def found(access: Access, path: Path | str) -> str:
    """The file at a path, which can be opened."""
    real = access.inside(str(path), "bundle 'm'")
    with stable_path(real, "bundle 'm'") as file:
        assert os.path.samefile(file, real)
    return real


class TestFolders:
    def test_what_lies_beneath_is_found(self, root: Path) -> None:
        access = Access([str(root.parent / "outside"), str(root)], "key")
        inside = root / "sub" / "b.safetensors"
        (root / "link").symlink_to(inside)
        for path in (inside, root / "sub" / ".." / "sub" / "b.safetensors", root / "link"):
            assert found(access, path) == str(inside)
        assert found(access, "b.safetensors") == str(root.parent / "outside" / "b.safetensors")

    def test_what_lies_elsewhere_is_refused_the_same_whether_it_is_there_or_not(self, root: Path) -> None:
        outside = root.parent / "outside"
        (root / "link").symlink_to(outside / "b.safetensors")
        (root / "folder").symlink_to(outside)
        said = set()
        for path in (
            outside / "b.safetensors",
            outside,
            outside / "nothing",
            root / ".." / "outside" / "b.safetensors",
            root / "link",
            root / "folder" / "b.safetensors",
            f"{root}-other/b.safetensors",
            "../outside/b.safetensors",
            "/dev/zero",
        ):
            with pytest.raises(BundleError) as error:
                found(Access([str(root)], "key"), path)
            said.add(str(error.value).replace(repr(str(path)), "PATH"))
        assert said == {"bundle 'm': PATH is not in a folder that this server loads from (--memory-root)"}

    @pytest.mark.parametrize(
        ("name", "problem"),
        [
            ("nothing", "no such file"),
            ("pipe", "not a regular file"),
            ("sub", "not a regular file"),
            ("a\0b", "not the name"),
            ("x" * 300, "too long"),
        ],
    )
    def test_what_is_no_file(self, root: Path, name: str, problem: str) -> None:
        os.mkfifo(root / "pipe")
        with pytest.raises(BundleError, match=problem):
            found(Access([str(root)], "key"), f"{root}/{name}")

    def test_without_a_folder_nothing_is_loaded(self, root: Path) -> None:
        with pytest.raises(ChangeRefused, match="no folder is allowed") as error:
            found(Access((), "key"), root / "b.safetensors")
        assert error.value.status == HTTPStatus.FORBIDDEN

    def test_a_root_that_is_everything(self, root: Path) -> None:
        assert found(Access(["/"], "key"), root / "b.safetensors") == str(root / "b.safetensors")
        with pytest.raises(BundleError, match="not a regular file"):
            found(Access(["/"], "key"), "/")


class Exchanging(Access):
    """Somebody exchanges a file or its folder for a link to the outside when its path has just been checked."""

    def __init__(self, root: Path, exchanged: Path) -> None:
        super().__init__([str(root)], "key")
        self.exchanged = exchanged

    def inside(self, path: str, what: str) -> str:
        real = super().inside(path, what)
        outside = Path(self._roots[0]).parent / "outside"
        target = outside if self.exchanged.is_dir() else outside / "b.safetensors"
        self.exchanged.rename(self.exchanged.with_name("was"))
        self.exchanged.symlink_to(target)
        return real


@pytest.mark.anyio
class TestExchange:
    """The registry reads the file that was checked, or none; its workers take everything."""

    @pytest.fixture
    def outside(self, root: Path) -> str:
        bundle = random_bundle(seed=1)
        write_bundle(bundle, root.parent / "outside" / "b.safetensors")
        return bundle.digest

    @pytest.mark.parametrize("exchanged", ["b.safetensors", "sub/b.safetensors", "sub"])
    async def test_between_the_check_and_the_reading(self, root: Path, outside: str, exchanged: str) -> None:
        registry = begin(InduceKVConfig(), Workers(), root.parent / "state")
        path = "b.safetensors" if exchanged == "b.safetensors" else "sub/b.safetensors"
        with pytest.raises(BundleError, match=r"became a symbolic link|Not a directory"):
            await registry.load("m", path, access=Exchanging(root, root / exchanged))
        assert not registry.shown().data


def test_the_admin_key() -> None:
    access = Access((), "key")
    access.require_admin("key")
    for key in (None, "", "Key", "key "):
        assert not access.is_admin(key)
        with pytest.raises(ChangeRefused) as error:
            access.require_admin(key)
        assert error.value.status == HTTPStatus.UNAUTHORIZED
    for without in (None, ""):
        assert not Access((), without).is_admin("")
        with pytest.raises(ChangeRefused) as error:
            Access((), without).require_admin("")
        assert error.value.status == HTTPStatus.FORBIDDEN


class TestServer:
    """Over HTTP."""

    def test_changes_are_in_the_log(self, bundles: Bundles, world: World, tmp_path: Path, server_folder: Path) -> None:
        log = server_folder / "server.log"
        (tmp_path / "bad.safetensors").write_bytes(b"{}")
        assert bundles.load("logged", tmp_path / "bad.safetensors").status_code == 400
        with bundles.loaded("logged", world.paths["other"]):
            assert bundles.load("logged", world.paths["first"], replace=True).status_code == 200
        httpx.post(f"{bundles.url}/v1/unload_memory_bundle", json={"name": "first"})
        before, after = world.bundles["other"].digest, world.bundles["first"].digest
        wait_until(lambda: f"memory of digest {before} released" in log.read_text())  # it is erased in the background
        lines = log.read_text().splitlines()
        for level, line in (
            ("WARNING", r"load of memory bundle 'logged' by admin at 127.0.0.1 refused after \d.*: truncated"),
            (
                "INFO",
                rf"load of memory bundle 'logged' by admin at 127.0.0.1 in \d.* before None, now {before}, 12 entries",
            ),
            ("INFO", rf"replace of memory bundle 'logged' by admin .*: digest before {before}, now {after}, "),
            ("INFO", rf"memory bundle 'logged' unloaded by admin at 127.0.0.1: digest {after}, used by 0 requests"),
            ("INFO", rf"memory of digest {before} released"),
            ("WARNING", "/v1/unload_memory_bundle from 127.0.0.1 refused: changes of bundles need the admin key"),
        ):
            assert [each for each in lines if f" {level} " in each and re.search(line, each)], line

    def test_a_trace_belongs_to_the_key_that_asked(self, server: str, client: openai.OpenAI) -> None:
        (prompt,) = prompts(1, seed=61)
        untraced = ask(client, "first", prompt)
        assert (untraced.model_extra or {}).get("kv_transfer_params") is None
        assert trace_at(f"{server}/v1", untraced.id).status_code == 404
        with client.with_options(api_key="alice") as alice, client.with_options(api_key="bob") as bob:
            named = {"extra_headers": {"X-Request-Id": "mine"}, "extra_body": TRACED}
            of_alice, of_bob = (ask(each, "first", prompt, **named) for each in (alice, bob))
        assert of_alice.id == of_bob.id
        url = f"{server}/v1"
        for key, response in (("alice", of_alice), ("bob", of_bob)):
            assert trace_at(url, response.id, key).json()["traces"] == [trace_of(response)]
        assert trace_at(url, of_alice.id, "carol").status_code == 404
        assert httpx.get(f"{url}/memory_trace/{of_alice.id}").status_code == 404

    def test_invocations_have_no_memory(self, server: str, client: openai.OpenAI) -> None:
        (prompt,) = prompts(1, seed=62)
        body = {"messages": prompt.messages, "max_tokens": 4, "temperature": 0, "logprobs": True}
        expected = ask(client, "base", prompt, max_tokens=4).choices[0].logprobs.content
        response = httpx.post(f"{server}/invocations", json={"model": "first", **body}, timeout=300)
        found = [step["logprob"] for step in response.json()["choices"][0]["logprobs"]["content"]]
        assert found == pytest.approx([step.logprob for step in expected], abs=1e-4)
