"""Questions asked over HTTP: of real servers, and of one made for the tests."""

import base64
import json
import threading
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.research.continual.answering import Answerer, Ask, OfflineAnswerer, stored_answers
from benchmarks.research.continual.answering.http import Endpoint, EndpointFailed, Endpoints, HttpAnswerer, HttpModel
from benchmarks.research.continual.methods import choose_methods
from benchmarks.research.continual.stream import Run, run_stream
from tests.research.small_streams import own_folder
from tests.unit.selector.imitated import Request, imitated_server


def predictions(out: Path, method: str, budget: int) -> list[str]:
    """The answers after the last task. A letter that the end of an answer cut in two is "\ufffd" in transformers, and
    nothing in vLLM; a model of random weights says many."""
    path = own_folder(out, method, budget=budget) / "01-field" / "predictions.jsonl"
    return [json.loads(line)["answer"].rstrip("\ufffd").strip() for line in path.read_text().splitlines()]


def answers(suite, model: Path, names: list[str], settings: list[str], budget: int, out: Path, answerer: Answerer):
    for method in choose_methods(names, settings):
        run_stream(Run(suite, method, model, budget, 0, out), answerer)
    return {name: predictions(out, name, budget) for name in names}


def models_at(url: str) -> set[str]:
    return {card["id"] for card in httpx.get(f"{url}/v1/models").json()["data"]}


def test_a_memory_answers_on_a_server_as_it_does_in_transformers(world, server, suite, tmp_path):
    """The same run twice, on a tiny model of random weights; nothing of it stays on the server."""
    before, plain = models_at(server), Endpoint(server, "base")
    given = (suite, world.model, ["refined", "no_memory"], ["steps=2", "learning_rate=0.3", "anchors_per_task=5"], 32)
    offline = answers(*given, tmp_path / "offline", OfflineAnswerer(world.model))
    found = answers(*given, tmp_path / "http", HttpAnswerer(world.model, Endpoints(plain, plain)))
    assert found == offline
    assert found["refined"] != found["no_memory"]
    assert models_at(server) == before


@pytest.mark.slow
def test_adapters_answer_on_a_server_as_they_do_in_transformers(adapted, server, suite, tmp_path):
    """One adapter for all tasks, and one for each task, where the gate is open; past it, the server without LoRA."""
    model, before = adapted.plain.model, models_at(adapted.url)
    settings = ["learning_rate=0.05", "steps=4", "anchors_per_task=5"]
    given = (suite, model, ["lora", "gated_task_lora", "no_memory"], settings, 4)
    offline = answers(*given, tmp_path / "offline", OfflineAnswerer(model))
    endpoints = Endpoints(Endpoint(server, "base"), Endpoint(adapted.url, "base"))
    found = answers(*given, tmp_path / "http", HttpAnswerer(model, endpoints))
    assert found == offline
    assert len(set(map(tuple, found.values()))) == 3
    assert models_at(adapted.url) == before


@dataclass
class Spoken:
    """A server that can only chat: it says "zorp", and after `patience` answers nothing more.

    It hangs up on the first `to_break` questions.
    """

    patience: int | None = None
    to_break: int = 0
    bodies: list[dict[str, Any]] = field(default_factory=list)  # of what was asked
    lock: threading.Lock = field(default_factory=threading.Lock)

    def serving(self) -> AbstractContextManager[str]:
        """The server's base URL."""
        return imitated_server(self.answer)

    def answer(self, request: Request) -> tuple[int, Any] | None:
        with self.lock:
            if self.to_break:
                self.to_break -= 1
                return None
            if self.patience is not None and len(self.bodies) >= self.patience:
                return None
            self.bodies.append(request.body)
        return 200, {"choices": [{"message": {"content": " zorp\n"}}]}


def sent(message: dict[str, Any]) -> bytes:
    return base64.b64decode(message["content"][0]["image_url"]["url"].partition("base64,")[2])


def test_questions_are_asked_greedily_with_pictures_and_exemplars_and_what_is_known_is_not_asked(suite):
    first, second, third = suite.tasks[0].test[:3]

    class Chosen:
        def asks(self, examples: Any) -> list[Ask]:
            return [Ask(first, False, exemplars=(second, third)), Ask(second, False, answer="known")]

    spoken = Spoken(to_break=2)  # a greedy question can be asked again
    with spoken.serving() as url:
        assert HttpModel(Chosen(), Endpoint(url, "m"), None, 2).answers([first, second]) == ["zorp", "known"]
    (body,) = spoken.bodies
    assert (body["model"], body["temperature"], body["max_tokens"]) == ("m", 0.0, 12)
    assert [message["role"] for message in body["messages"]] == ["user", "assistant"] * 2 + ["user"]
    asked = [message for message in body["messages"] if message["role"] == "user"]
    assert [sent(each) for each in asked] == [example.images[0].read_bytes() for example in (second, third, first)]
    assert asked[-1]["content"][1:] == [part for part in first.messages[0]["content"] if part["type"] == "text"]
    assert body["messages"][1]["content"] == [{"type": "text", "text": second.answer}]


def test_a_server_that_dies_is_named_with_how_far_it_got_and_the_stream_goes_on(suite, model, tmp_path, monkeypatch):
    monkeypatch.setattr(stored_answers, "AT_ONCE", 4)
    (method,) = choose_methods(["no_memory"])
    run = Run(suite, method, model, 32, 0, tmp_path)

    def over(url: str) -> HttpAnswerer:
        return HttpAnswerer(model, Endpoints(Endpoint(url, "m"), Endpoint(url, "m")))

    # All after the first task; of the 6 questions new after the second, 4 kept.
    with (
        Spoken(patience=6 + 9 + 5).serving() as url,
        pytest.raises(
            EndpointFailed, match=r"cannot be reached: .*; 19 of 21 questions are answered \(no_memory, .*field"
        ),
    ):
        run_stream(run, over(url))
    spoken = Spoken()
    with spoken.serving() as url:
        run_stream(run, over(url))
    assert len(spoken.bodies) == 2
    assert len(predictions(tmp_path, "no_memory", 32)) == 6 + 6 + 9
