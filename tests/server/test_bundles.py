"""Loading, replacing and unloading bundles over HTTP, also while requests run, and every bad bundle."""

import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.engine.parity import TOLERANCE, World, largest_deviation, prompts
from tests.server.http import TRACED, Bundles, ask, deviation, tokens_of_stream, trace_at, trace_of

# Many samples of many tokens each: a handful of such requests keeps a server with few KV blocks busy for seconds.
SLOW: dict[str, Any] = {"n": 4, "temperature": 1.0, "seed": 1, "max_tokens": 150}


def test_the_list_has_what_is_loaded(bundles: Bundles, world: World) -> None:
    cards = bundles.cards()
    assert cards.keys() == {"first", "second"}
    card, bundle = cards["first"], world.bundles["first"]
    assert card["digest"] == bundle.digest
    assert card["entries"] == 12
    assert card["tasks"] == {"t": 12}
    assert card["file_bytes"] == world.paths["first"].stat().st_size
    assert card["resident_bytes"] > 0
    assert card["active_requests"] == 0


def test_load_use_and_unload(bundles: Bundles, client: openai.OpenAI, world: World) -> None:
    digest = world.bundles["other"].digest
    loaded = bundles.load("late", world.paths["other"])
    assert loaded.status_code == 200, loaded.text
    assert loaded.json()["digest"] == digest
    assert "late" in {model.id for model in client.models.list()}
    (prompt,) = prompts(1, seed=11)
    assert deviation(world, ask(client, "late", prompt), prompt, world.bundles["other"]) <= TOLERANCE
    assert bundles.unload("late").json() == {"name": "late", "digest": digest}
    with pytest.raises(openai.NotFoundError):
        ask(client, "late", prompt)
    bundles.wait_until_drained()


def test_a_replaced_file_of_the_same_name_and_path_is_never_stale(
    bundles: Bundles, client: openai.OpenAI, world: World, tmp_path: Path
) -> None:
    """Neither keys, nor prefix blocks, nor resident pages of the old content answer for the new one."""
    path = tmp_path / "m.safetensors"
    shutil.copy(world.paths["first"], path)
    (prompt,) = prompts(1, seed=13)
    with bundles.loaded("m", path):
        for name in ("first", "other", "second", "other"):
            shutil.copy(world.paths[name], path)
            assert bundles.load("m", path, replace=True).status_code == 200
            response = ask(client, "m", prompt, extra_body=TRACED)
            assert trace_of(response)["digest"] == world.bundles[name].digest
            assert deviation(world, response, prompt, world.bundles[name]) <= TOLERANCE


def test_a_request_ends_on_the_bundle_it_began_with(bundles: Bundles, client: openai.OpenAI, world: World) -> None:
    questions = prompts(4, seed=14)
    with bundles.loaded("moving", world.paths["other"]):
        streams = [ask(client, "moving", prompt, stream=True, **SLOW, extra_body=TRACED) for prompt in questions]
        assert bundles.load("moving", world.paths["first"], replace=True).status_code == 200
        late = ask(client, "moving", questions[0], extra_body=TRACED)
        received = [list(stream) for stream in streams]

        assert trace_of(late)["digest"] == world.bundles["first"].digest
        for prompt, parts in zip(questions, received, strict=True):
            (trace,) = trace_at(str(client.base_url), parts[0].id).json()["traces"]
            assert trace["digest"] == world.bundles["other"].digest
            tokens, logprobs = tokens_of_stream(parts)
            assert len(tokens) == SLOW["max_tokens"]
            assert largest_deviation(world, prompt, tokens, logprobs, world.bundles["other"]) <= TOLERANCE


def test_a_request_may_be_pinned_to_a_version(bundles: Bundles, client: openai.OpenAI, world: World) -> None:
    (prompt,) = prompts(1, seed=18)
    digests = {name: world.bundles[name].digest for name in ("other", "first")}
    with bundles.loaded("pinned", world.paths["other"]):
        for model in (f"pinned@{digests['other']}", f"pinned@{digests['other'][:12]}"):
            response = ask(client, model, prompt, extra_body=TRACED)
            assert response.model == model
            assert trace_of(response)["digest"] == digests["other"]
            assert deviation(world, response, prompt, world.bundles["other"]) <= TOLERANCE
            assert client.models.retrieve(model).root == digests["other"]  # type: ignore[attr-defined]
        assert not any("@" in model.id for model in client.models.list())
        begun = ask(client, f"pinned@{digests['other']}", prompt, stream=True, **SLOW)
        next(begun)
        assert bundles.load("pinned", world.paths["first"], replace=True).status_code == 200
        for model in (f"pinned@{digests['other']}", "pinned@0123456789ab", f"pinned@{digests['first'][:11]}"):
            with pytest.raises(openai.NotFoundError):
                ask(client, model, prompt)
        late = ask(client, f"pinned@{digests['first']}", prompt, extra_body=TRACED)
        assert trace_of(late)["bundle"] == "pinned"
        assert {choice.finish_reason for part in begun for choice in part.choices} == {None, "length"}


class TestRefusals:
    """Each is a 4xx that names the problem, leaves what is loaded as it is, and the server serving."""

    @pytest.fixture(autouse=True)
    def _nothing_changes(self, bundles: Bundles, client: openai.OpenAI) -> Any:
        before = bundles.list()
        yield
        assert bundles.list() == before
        assert ask(client, "first", prompts(1, seed=16)[0]).choices

    def refused(self, response: httpx.Response, message: str, status: int = 400) -> None:
        assert response.status_code == status, response.text
        error = response.json()["error"]
        assert message in error["message"]
        assert error["code"] == status

    @pytest.mark.parametrize(
        ("name", "message"),
        [
            ("first", "loaded already"),
            ("base", "taken by the served model"),
            ("image", "kind of message content"),
            ("Text", "kind of message content"),
            ("", "at most 128"),
            ("a name", "at most 128"),
            ("x" * 129, "at most 128"),
            ("first@0123456789ab", "pinned to a version"),
            ("a/examples/b", "between a name and a fact's id"),
            ("examples", "between a name and a fact's id"),
        ],
    )
    def test_of_names(self, bundles: Bundles, world: World, name: str, message: str) -> None:
        self.refused(bundles.load(name, world.paths["other"]), message)

    @pytest.mark.parametrize("replacing", [False, True])
    def test_of_a_damaged_file(self, bundles: Bundles, world: World, tmp_path: Path, replacing: bool) -> None:
        path, content = tmp_path / "damaged.safetensors", world.paths["other"].read_bytes()
        path.write_bytes(content[:-7] + bytes([content[-7] ^ 1]) + content[-6:])
        self.refused(bundles.load("first" if replacing else "new", path, replace=replacing), "digest")


def test_a_name_loaded_twice_at_once_is_loaded_once(bundles: Bundles, world: World) -> None:
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda _: bundles.load("race", world.paths["other"]).status_code, range(4)))
    assert sorted(answers) == [200, 400, 400, 400]
    bundles.unload("race")
    bundles.wait_until_drained()
