"""Versions of a name on a registry whose workers take everything: compare and swap, rollback, and restarts."""

import asyncio
import contextlib
import shutil
import sqlite3
from pathlib import Path

import pytest
from vllm.exceptions import RetryableRequestError

from inducekv_vllm.errors import BundleError, ConfigError, UnknownBundle, VersionConflict
from inducekv_vllm.vllm_seams.config import InduceKVConfig
from server.registry import BundleRegistry
from tests.server.registries import BUNDLES, DIGEST, NAMES, RUN, Workers, begin, end, write_all

pytestmark = pytest.mark.anyio


def served(registry: BundleRegistry, name: str = "m") -> str:
    """The versions of a name, the served one first: "cab" is c, before it a, and before that b."""
    (card,) = (card for card in registry.shown().data if card.name == name)
    assert card.digest == card.versions[0].digest
    return "".join(next(n for n in NAMES if DIGEST[n] == version.digest) for version in card.versions)


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    write_all(tmp_path, BUNDLES)
    return {name: str(tmp_path / f"{name}.safetensors") for name in NAMES}


@pytest.fixture(params=[False, True], ids=["temporary", "state file"])
def state(request: pytest.FixtureRequest, tmp_path: Path) -> str | None:
    return str(tmp_path / "state") if request.param else None


@pytest.fixture
def registry(state: str | None, tmp_path: Path) -> BundleRegistry:
    return begin(InduceKVConfig(state=state), Workers(), tmp_path / "temporary")


async def test_compare_and_swap(registry: BundleRegistry, files: dict[str, str]) -> None:
    await registry.load("m", files["a"])
    with pytest.raises(VersionConflict, match=f"expected digest {DIGEST['b']}, found {DIGEST['a']}"):
        await registry.load("m", files["c"], expected_digest=DIGEST["b"])
    with pytest.raises(VersionConflict, match="found no bundle"):
        await registry.load("new", files["c"], expected_digest=DIGEST["b"])
    for change in (registry.unload("m", expected_digest=""), registry.rollback("m", expected_digest=DIGEST["b"])):
        with pytest.raises(VersionConflict):
            await change
    # Of those who have seen the same version, one wins.
    loads = (registry.load("m", files[name], expected_digest=DIGEST["a"]) for name in "bc")
    outcomes = await asyncio.gather(*loads, return_exceptions=True)
    assert [type(outcome).__name__ for outcome in outcomes] == ["MemoryBundleCard", "VersionConflict"]
    assert served(registry) == "ba"
    assert await registry.unload("m", expected_digest=DIGEST["b"]) == DIGEST["b"]


async def test_rollback(registry: BundleRegistry, files: dict[str, str]) -> None:
    for name in NAMES:
        await registry.load("m", files[name], replace=True)
    card = await registry.rollback("m", who="admin")
    assert (card.digest, card.path, card.versions[0].by) == (DIGEST["b"], files["b"], "admin")
    assert served(registry) == "bca"
    await registry.rollback("m", digest=DIGEST["a"])
    assert served(registry) == "abc"
    await registry.rollback("m")
    assert served(registry) == "bac"
    with pytest.raises(ConfigError, match="no earlier version of digest 00; kept are"):
        await registry.rollback("m", digest="00")
    with pytest.raises(UnknownBundle):
        await registry.rollback("nobody")
    await registry.load("n", files["a"])
    with pytest.raises(ConfigError, match="'n' has no earlier version; kept are: none"):
        await registry.rollback("n")


async def test_rollback_after_the_file_was_replaced(
    registry: BundleRegistry, state: str | None, files: dict[str, str], tmp_path: Path
) -> None:
    """Without copies it is refused, and what is served stays."""
    path = str(tmp_path / "m.safetensors")
    for name in "ab":
        shutil.copy(files[name], path)
        await registry.load("m", path, replace=True)
    if state is None:
        with pytest.raises(BundleError, match=f"the file has changed: expected digest {DIGEST['a']}"):
            await registry.rollback("m")
        assert served(registry) == "ba"
    else:
        await registry.rollback("m")
        assert served(registry) == "ab"


async def test_who_and_where_are_shown_to_the_admin_only(registry: BundleRegistry, files: dict[str, str]) -> None:
    await registry.load("m", files["a"], who="admin at 10.0.0.7")
    shown = {is_admin: registry.shown(is_admin=is_admin).data[0] for is_admin in (False, True)}
    assert [(v.by, v.source) for v in shown[True].versions] == [("admin at 10.0.0.7", files["a"])]
    assert "10.0.0.7" not in shown[False].model_dump_json()
    assert files["a"] not in shown[False].model_dump_json()


async def test_a_restart_serves_what_was_acknowledged_last(files: dict[str, str], tmp_path: Path) -> None:
    config = InduceKVConfig(state=str(tmp_path / "state"), bundles={"kept": files["a"], "moved": files["a"]})
    first = begin(config, Workers())
    await first.start(RUN)
    source = str(tmp_path / "m.safetensors")
    shutil.copy(files["a"], source)
    await first.load("m", source, who="admin")
    await first.load("moved", files["b"], replace=True, who="admin")
    await first.load("gone", files["c"], who="admin")
    await first.unload("gone", who="admin")
    Path(source).unlink()
    with pytest.raises(ConfigError, match="another server uses this state file"):
        begin(config, Workers())
    await end(first)

    changed = config.model_copy(update={"bundles": {"kept": files["c"], "moved": files["a"]}})
    workers = Workers()
    second = begin(changed, workers)
    await second.start(RUN)
    assert {card.name for card in second.shown().data} == {"kept", "moved", "m"}
    assert served(second, "m") == "a"
    assert served(second, "moved") == "ba"  # it was changed while the server ran
    assert served(second, "kept") == "ca"  # it was not: as the settings say now
    assert set(workers.resident) == {DIGEST["b"], DIGEST["c"]}  # of the command line
    await second.bring("m")
    assert set(workers.resident) == set(DIGEST.values())
    await end(second)

    (tmp_path / "state").rename(tmp_path / "moved")
    third = begin(config.model_copy(update={"bundles": {}, "state": str(tmp_path / "moved")}), Workers())
    await third.start(RUN)
    assert {card.name for card in third.shown().data} == {"moved", "m"}


@pytest.mark.parametrize("damage", ["cut off", "changed", "another bundle"])
async def test_a_restart_goes_without_a_version_that_cannot_be_read(
    files: dict[str, str], tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    """Its requests are refused: not even the command line's version answers, until the name is loaded again."""
    config = InduceKVConfig(state=str(tmp_path / "state"), bundles={"m": files["a"]})
    first = begin(config, Workers())
    await first.start(RUN)
    await first.load("m", files["b"], replace=True, who="admin")
    await first.load("n", files["c"], who="admin")
    await end(first)
    with contextlib.closing(sqlite3.connect(tmp_path / "state")) as found, found:
        ((whole,),) = found.execute("SELECT bundle FROM contents WHERE digest = ?", (DIGEST["b"],)).fetchall()
        damaged = {
            "cut off": whole[:-1],
            "changed": whole[:-1] + bytes([whole[-1] ^ 1]),
            "another bundle": Path(files["c"]).read_bytes(),
        }[damage]
        found.execute("UPDATE contents SET bundle = ? WHERE digest = ?", (damaged, DIGEST["b"]))

    second = begin(config, Workers())
    await second.start(RUN)
    assert len([line for line in caplog.messages if "memory bundle 'm' cannot be loaded: " in line]) == 1
    await second.bring("n")
    with pytest.raises(RetryableRequestError, match="memory bundle 'm' cannot be loaded now"):
        await second.bring("m")
    await second.load("m", files["b"], replace=True, who="admin")
    await second.bring("m")
    assert served(second) == "ba"
    assert second.state.kept(DIGEST["b"])[1] == whole


async def test_a_list_leaves_out_what_goes_while_it_is_made(
    registry: BundleRegistry, files: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in "mn":
        await registry.load(name, files["a"])
    page = registry.state.page

    def and_one_goes(after: str, limit: int) -> list[tuple[str, str]]:
        found = page(after, limit)
        registry.state.unload("m", "admin")
        return found

    monkeypatch.setattr(registry.state, "page", and_one_goes)
    assert [card.name for card in registry.shown().data] == ["n"]
