"""Questions asked over HTTP: of real servers, of an endpoint made for the tests, and of none that would answer."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from benchmarks.continual.__main__ import main
from benchmarks.continual.answering import Ask, stored_answers
from benchmarks.continual.answering.endpoint import Endpoint, EndpointFailed, models_at
from benchmarks.continual.answering.http import Endpoints, HttpModel
from benchmarks.continual.answering.plans import Plain
from benchmarks.continual.methods import choose_methods
from benchmarks.continual.serving import Needs, given_endpoints
from inducekv_vllm.errors import ConfigError
from server.demo import CHECKPOINT
from tests.benchmarks.fake_server import FakeHandler, serving
from tests.benchmarks.small_streams import command, own_folder, untouched

pytestmark = pytest.mark.usefixtures("without_report")


def over_http(data: Path, out: Path, url: str, *more: str) -> list[str]:
    return command(data, out, "--answer", "http", "--endpoint", url, *more)


def predictions(out: Path, method: str, budget: int) -> list[str]:
    """The answers after the last task. A letter that the end of an answer cut in two is "\ufffd" in transformers, and
    nothing in vLLM; a model of random weights says many."""
    path = own_folder(out, method, budget=budget) / "01-field" / "predictions.jsonl"
    return [json.loads(line)["answer"].rstrip("\ufffd").strip() for line in path.read_text().splitlines()]


def test_a_memory_answers_on_a_server_as_it_does_in_transformers(world, server, data, tmp_path):
    """The same run twice, on a tiny model of random weights; nothing of it stays on the server."""
    arguments = ["--model", str(world.model), "--method", "refined", "no_memory", "--set", "learning_rate=0.3"]
    assert main(command(data, tmp_path / "offline", *arguments)) == 0
    assert main(over_http(data, tmp_path / "http", f"{server}/v1", *arguments, "--endpoint-model", "base")) == 0
    found = {method: predictions(tmp_path / "http", method, 32) for method in ("refined", "no_memory")}
    for method, answers in found.items():
        assert answers == predictions(tmp_path / "offline", method, 32)
    assert found["refined"] != found["no_memory"]
    configuration = json.loads((tmp_path / "http" / "run.json").read_bytes())
    assert configuration["answer"] == {"by": "http", "server": "given"}
    assert configuration["where"]["endpoint"] == [f"{server}/v1"]
    assert {card["id"] for card in models_at(server)} == {"base", "sqrt", "prior"}


@pytest.mark.slow
def test_adapters_answer_on_a_server_as_they_do_in_transformers(adapted, server, data, suite, tmp_path):
    """One adapter for all tasks, and one for each task, where the gate is open; past it, the server without LoRA."""
    arguments = ["--model", str(adapted.plain.model), "--method", "lora", "gated_task_lora", "no_memory"]
    arguments += ["--set", "learning_rate=0.05", "--set", "steps=4", "--budget", "4"]
    assert main(command(data, tmp_path / "offline", *arguments)) == 0
    assert main(over_http(data, tmp_path / "http", server, *arguments, "--endpoint", server, adapted.url)) == 0
    found = {method: predictions(tmp_path / "http", method, 4) for method in ("lora", "gated_task_lora", "no_memory")}
    for method, answers in found.items():
        assert answers == predictions(tmp_path / "offline", method, 4)
    assert len(set(map(tuple, found.values()))) == 3
    assert {card["id"] for card in models_at(adapted.url)} == {"base", "style", "m"}
    # Of several endpoints each artifact goes to the first one that loads it.
    needs = Needs(adapted.plain.model, suite, choose_methods(["refined", "lora"]), budget=4, jobs=1)
    plain, lora = Endpoint(server, "base"), Endpoint(adapted.url, "base")
    assert given_endpoints([server, adapted.url], "base", needs, tmp_path) == Endpoints(plain, lora)
    assert given_endpoints([adapted.url, server], "base", needs, tmp_path) == Endpoints(lora, lora)


def test_an_endpoint_of_another_model_is_refused_for_memories(server, data, tmp_path, capsys):
    """It has the route and refuses what the run would load; nothing has been learned when that is said."""
    out = tmp_path / "out"
    assert main(over_http(data, out, server, "--model", str(CHECKPOINT), "--method", "refined")) == 2
    said = capsys.readouterr().err
    assert "refined: the answers need an endpoint that loads what was learned (POST /v1/load_memory_bundle)" in said
    assert "was made for another backbone" in said
    assert not list(out.rglob("state*"))


@dataclass
class Spoken:
    """An OpenAI-compatible endpoint that can only chat: it says "zorp", and after `patience` answers nothing more.

    It hangs up on the first `to_break` questions.
    """

    patience: int | None = None
    to_break: int = 0
    models: tuple[str, ...] = ("some-model",)
    bodies: list[dict[str, Any]] = field(default_factory=list)  # of what was asked
    headers: list[dict[str, str]] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    @contextmanager
    def serving(self) -> Iterator[str]:
        spoken = self

        class Handler(FakeHandler):
            def do_GET(self) -> None:
                self.reply(200, {"data": [{"id": name} for name in spoken.models]})

            def do_POST(self) -> None:
                body = self.body()
                if self.path != "/v1/chat/completions":
                    return self.reply(404, {"detail": "Not Found"})
                with spoken.lock:
                    if spoken.to_break:
                        spoken.to_break -= 1
                        return self.connection.close()
                    if spoken.patience is not None and len(spoken.bodies) >= spoken.patience:
                        return self.connection.close()
                    spoken.bodies.append(body)
                    spoken.headers.append(dict(self.headers))
                return self.reply(200, {"choices": [{"message": {"content": " zorp\n"}}]})

        with serving(Handler) as url:
            yield url


def test_any_endpoint_is_asked_greedily_with_the_pictures_in_the_requests(data, suite, tmp_path, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "open-sesame")
    spoken = Spoken()
    with spoken.serving() as url:
        assert main(untouched(data, tmp_path / "out", url)) == 0
    assert set(predictions(tmp_path / "out", "no_memory", 32)) == {"zorp"}
    assert {headers["Authorization"] for headers in spoken.headers} == {"Bearer open-sesame"}
    assert len(spoken.bodies) == 6 + 6 + 9
    example = suite.tasks[0].test[0]
    (text,) = [part for part in example.messages[0]["content"] if part["type"] == "text"]
    url = f"data:image/png;base64,{base64.b64encode(example.images[0].read_bytes()).decode()}"
    messages = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}, text]}]
    body = {"model": "some-model", "temperature": 0.0, "max_tokens": 12, "messages": messages}
    assert spoken.bodies.count(body) == 1


def test_exemplars_stand_before_the_question_and_what_is_known_is_not_asked(suite):
    first, second, third = suite.tasks[0].test[:3]

    class Chosen:
        def asks(self, examples: Any) -> list[Ask]:
            return [Ask(first, False, exemplars=(second, third)), Ask(second, False, answer="known")]

    spoken = Spoken()
    with spoken.serving() as url:
        assert HttpModel(Chosen(), Endpoint(url, "m"), None, 2).answers([first, second]) == ["zorp", "known"]
    (body,) = spoken.bodies
    assert [message["role"] for message in body["messages"]] == ["user", "assistant"] * 2 + ["user"]
    urls = [message["content"][0]["image_url"]["url"] for message in body["messages"] if message["role"] == "user"]
    sent = [base64.b64decode(url.partition("base64,")[2]) for url in urls]
    assert sent == [example.images[0].read_bytes() for example in (second, third, first)]
    assert body["messages"][1]["content"] == [{"type": "text", "text": second.answer}]


@pytest.mark.parametrize(
    ("method", "route"), [("refined", "/v1/load_memory_bundle"), ("lora_replay", "/v1/load_lora_adapter")]
)
def test_what_an_endpoint_cannot_load_is_refused_before_anything_is_learned(method, route, data, tmp_path, capsys):
    out = tmp_path / "out"
    with Spoken().serving() as url:
        assert main(over_http(data, out, url, "--method", "no_memory", method)) == 2
    said = capsys.readouterr().err
    assert f"{method}: the answers need an endpoint that loads what was learned (POST {route}): {url} has no" in said
    assert not list(out.rglob("state*"))


def test_an_endpoint_that_dies_is_named_with_how_far_it_got_and_the_run_goes_on(data, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(stored_answers, "AT_ONCE", 4)
    out = tmp_path / "out"
    dying = Spoken(patience=6 + 9 + 5)  # all after the first task; of the 6 questions new after the second, 4 kept
    with dying.serving() as url:
        assert main(untouched(data, out, url)) == 1
    said = capsys.readouterr().err
    assert f"{url} does not answer" in said
    assert "19 of 21 questions are answered (no_memory, budget 32, seed 0, after learning task 2 of 2, field)" in said
    assert "run it again with the same arguments to go on" in said
    spoken = Spoken()
    with spoken.serving() as url:
        assert main(untouched(data, out, url)) == 0
    assert len(spoken.bodies) == 2
    assert len(predictions(out, "no_memory", 32)) == 6 + 6 + 9


def test_a_question_whose_connection_breaks_is_asked_again(data, tmp_path):
    spoken = Spoken(to_break=2)
    with spoken.serving() as url:
        assert main(untouched(data, tmp_path / "out", url)) == 0
    assert len(spoken.bodies) == 6 + 6 + 9
    assert set(predictions(tmp_path / "out", "no_memory", 32)) == {"zorp"}


def test_an_endpoint_that_is_not_there_is_named(data, tmp_path, capsys):
    assert main(untouched(data, tmp_path / "out", "http://127.0.0.1:9")) == 1
    assert "http://127.0.0.1:9 does not answer (ConnectError" in capsys.readouterr().err


def test_a_refused_question_is_named_with_what_the_server_said(server, suite):
    example = suite.tasks[0].test[0]
    model = HttpModel(Plain(with_artifact=False), Endpoint(server, "nonesuch"), None, 2)
    with pytest.raises(EndpointFailed, match=f"{server}: question 'guild/test_00000': HTTP 404: .*nonesuch"):
        model.answers([example])


def test_of_several_models_the_untouched_one_must_be_named():
    with Spoken(models=("one", "two")).serving() as url:
        assert Endpoint.at(f"{url}/v1/", "two") == Endpoint(url, "two")
        with pytest.raises(ConfigError, match="serves one, two: say with --endpoint-model"):
            Endpoint.at(url)
        with pytest.raises(ConfigError, match="serves no model 'three', it serves: one, two"):
            Endpoint.at(url, "three")
