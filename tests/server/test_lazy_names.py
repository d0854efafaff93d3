"""Over HTTP: a bundle that nobody has loaded answers when it is asked for by name, and lists are paged."""

import shutil
from pathlib import Path

import httpx
import openai
import pytest

from tests.engine.parity import TOLERANCE, Prompt, World
from tests.server.http import Bundles, ask, deviation, wait_until
from tests.server.launch import FOUND


def publish(world: World, content: str, server_folder: Path, name: str) -> Path:
    path = server_folder / FOUND / f"{name}.safetensors"
    path.parent.mkdir(exist_ok=True)
    shutil.copy(world.paths[content], path.with_suffix(".part"))
    return path.with_suffix(".part").rename(path)


def test_a_bundle_is_found_by_its_name(
    client: openai.OpenAI, bundles: Bundles, world: World, server_folder: Path, questions: list[Prompt]
) -> None:
    """Published again, it is another version; deleted, it is gone."""
    prompt, name = questions[0], "team/acme"
    path = publish(world, "other", server_folder, name)
    assert deviation(world, ask(client, name, prompt), prompt, world.bundles["other"]) <= TOLERANCE
    card = bundles.cards()[name]
    assert (card["is_resident"], card["pinned"], card["path"]) == (True, False, str(path))
    assert name in {model.id for model in client.models.list()}
    publish(world, "second", server_folder, name)
    wait_until(lambda: ask(client, name, prompt, max_tokens=1) and bundles.cards()[name]["digest"] != card["digest"])
    assert deviation(world, ask(client, name, prompt), prompt, world.bundles["second"]) <= TOLERANCE
    pinned = f"{name}@{world.bundles['second'].digest}"
    assert deviation(world, ask(client, pinned, prompt), prompt, world.bundles["second"]) <= TOLERANCE
    path.unlink()
    wait_until(lambda: _status(client, name) == 404)
    assert name not in bundles.cards()
    bundles.wait_until_drained()


def test_names_that_nobody_has_and_files_that_are_none(
    server: str, client: openai.OpenAI, bundles: Bundles, server_folder: Path
) -> None:
    before = bundles.list()
    (server_folder / FOUND / "broken.safetensors").write_text("notes")
    assert [_status(client, name) for name in ("nobody", "../state", "broken", "broken")] == [404, 404, 503, 503]
    assert bundles.list() == before
    answer = httpx.post(f"{server}/v1/completions", json={"model": "broken", "prompt": "a"}, timeout=60)
    assert answer.json()["error"]["message"] == (
        "memory bundle 'broken' cannot be used as it is now; please retry later"
    )


def _status(client: openai.OpenAI, model: str) -> int:
    try:
        client.chat.completions.create(model=model, messages=[{"role": "user", "content": "a"}], max_tokens=1)
    except openai.APIStatusError as error:
        return error.status_code
    return 200


@pytest.mark.parametrize("route", ["models", "memory_bundles"])
def test_lists_are_paged(server: str, bundles: Bundles, world: World, route: str) -> None:
    with bundles.loaded("third", world.paths["other"]), bundles.loaded("another", world.paths["other"]):
        listed: list[str] = []
        more = True
        while more:
            query = {"limit": 1, "after": listed[-1] if listed else ""}
            page = httpx.get(f"{server}/v1/{route}", params=query).json()
            listed += [each["id"] if route == "models" else each["name"] for each in page["data"]]
            more = page["has_more"]
        names = ["another", "first", "second", "third"]
        assert listed == (["base", *names] if route == "models" else names)
        assert httpx.get(f"{server}/v1/{route}", params={"limit": 0}).status_code == 400
