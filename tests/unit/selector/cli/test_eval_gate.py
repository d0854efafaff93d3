"""`inducekv-bundle eval --gate`: its counts, decided here and by a server."""

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from inducekv_vllm.bundle import Bundle, Gate, read_bundle
from selector.backbone.model import Backbone
from selector.backbone.token_values import evidence_of
from selector.client import API_KEY_VARIABLE
from selector.data.examples import Example, read_task
from selector.gate.background import read_background
from tests.bundles import random_bundle, random_gate
from tests.gates import bundle_behind
from tests.unit.selector.cli.bundle_command import command, refuse, written
from tests.unit.selector.imitated import Request, imitated_server

REQUESTS = ("Open the door.", "Sing a song about doors.", "zzz", "What is the capital of the moon?")


@pytest.fixture(scope="module")
def bundle(llava: Backbone, tasks: dict[str, Path]) -> Bundle:
    """A gate that decides on its tasks' questions in every way."""
    examples = [example for task in ("colours", "counts") for example in read_task(tasks[task])[:2]]
    asked = [example for task in ("colours", "counts", "places") for example in read_task(tasks[task])]
    for seed in range(50):
        gate = random_gate(llava.fingerprint, ("colours", "counts"), seed=seed)
        found = evidence_of(llava, gate, asked)
        decisions = [gate.rule.decide(evidence) for evidence in found.numpy()]
        if len({decision.task for decision in decisions}) == 3:
            return bundle_behind(gate, llava, examples)
    raise AssertionError("no such gate")


@pytest.fixture
def path(bundle: Bundle, tmp_path: Path) -> Path:
    return written(bundle, tmp_path / "both.safetensors")


@pytest.fixture
def requests(tmp_path: Path) -> Path:
    path = tmp_path / "requests.txt"
    path.write_text("\n".join(REQUESTS))
    return path


def decided(backbone: Backbone, gate: Gate, example: Example) -> tuple[str | None, str | None]:
    """By the formula."""
    evidence = evidence_of(backbone, gate, [example])[0].double().tolist()
    margins, likeness = [], []
    for weights, threshold in zip(gate.weights.double().tolist(), gate.thresholds.double().tolist(), strict=True):
        products = [w * e for w, e in zip(weights, evidence, strict=True)]
        margins.append(sum(products) - threshold)
        likeness.append(sum(p for p in products if p > 0) / sum(w for w in weights if w > 0))
    if max(margins) >= 0:
        return gate.tasks[margins.index(max(margins))], None
    return None, "outside" if max(likeness) < 0.2 else "below_threshold"


def row(task: str, kind: str, examples: list[Example], decisions: list[tuple[str | None, str | None]]) -> list[str]:
    """The cells that the table must have."""
    sent = [each for each, _ in decisions]
    opened = sum(each is not None for each in sent)
    own = [str(sent.count(task)), str(opened - sent.count(task))] if task != "no task" else ["-", "-"]
    closed = [str([reason for _, reason in decisions].count(reason)) for reason in ("outside", "below_threshold")]
    return [*task.split(), kind, str(len(examples)), own[0], str(opened), own[1], *closed]


def test_counts_are_those_of_single_decisions(
    llava: Backbone, bundle: Bundle, path: Path, tasks: dict[str, Path], requests: Path, model_folders: dict[str, Path]
) -> None:
    gate = bundle.gate
    assert gate is not None
    files = [tasks["colours"], tasks["counts"], tasks["places"], requests]
    asked = [part for file in files for part in ("--questions", file)]
    lines = command("eval", "--gate", path, *asked, "--model", model_folders["llava"]).splitlines()
    expected = []
    for file, task in zip(files, ("colours", "counts", "no task", "no task"), strict=True):
        examples = read_background(file)
        expected.append(row(task, file.stem, examples, [decided(llava, gate, each) for each in examples]))
    assert [line.split() for line in lines[1 : 1 + len(files)]] == expected
    assert lines[0].split()[:3] == ["task", "kind", "questions"]


class FakeServer:
    """Decides by the text of a question."""

    def __init__(self, digest: str) -> None:
        self.digest, self.seen, self.headers = digest, list[Any](), list[dict[str, str]]()
        self.trace: dict[str, Any] | None = {}
        self.name = "both"

    def answer(self, request: Request) -> tuple[int, Any]:
        self.headers.append(dict(request.headers))
        if request.path == f"/v1/memory_bundles/{self.name}":
            return 200, {"name": self.name, "digest": self.digest}
        if request.path.startswith("/v1/memory_bundles?"):
            return 200, {"data": [{"name": self.name, "digest": self.digest}], "has_more": False}
        if request.path.startswith("/v1/memory_bundles/"):
            return 404, {"error": {"message": "no memory bundle of this name is loaded"}}
        assert request.path == "/v1/chat/completions"
        self.seen.append(request.body)
        if self.trace is None:
            return 200, ANSWER
        text = json.dumps(request.body["messages"])
        task = "counts" if "squares" in text else None
        gate = {"open": task is not None, "task": task, "closed": None if task else "outside"}
        return 200, ANSWER | {"kv_transfer_params": {"inducekv": {"gate": gate}}}


ANSWER = {"id": "chatcmpl-1", "choices": [{"message": {"content": "3"}}]}


def test_a_server_is_asked(path: Path, tasks: dict[str, Path], requests: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(API_KEY_VARIABLE, "secret")
    monkeypatch.setenv("INDUCEKV_ADMIN_KEY", "admin")
    server = FakeServer(read_bundle(path).digest)
    asked = [part for file in (tasks["colours"], tasks["counts"], requests) for part in ("--questions", file)]
    with imitated_server(server.answer) as url:
        lines = command("eval", "--gate", path, *asked, "--url", url).splitlines()
    assert [line.split() for line in lines[1:4]] == [
        ["colours", "train", "12", "0", "0", "0", "12", "0"],
        ["counts", "train", "12", "12", "12", "0", "0", "0"],
        ["no", "task", "requests", "4", "-", "0", "-", "4", "0"],
    ]
    assert len(server.seen) == 28
    for body in server.seen:
        assert (body["model"], body["max_tokens"], body["vllm_xargs"]) == ("both", 1, {"inducekv_trace": 1})
    sent = {url for body in server.seen for url in _pictures(body)}
    pictures = {image.read_bytes() for example in read_task(tasks["counts"]) for image in example.images}
    assert {base64.b64decode(url.partition("base64,")[2]) for url in sent} == pictures
    assert {headers.get("Authorization") for headers in server.headers} == {"Bearer secret"}
    assert not any("admin" in headers.values() for headers in server.headers)  # nothing is changed


def _pictures(body: Any) -> list[str]:
    parts = [part for message in body["messages"] for part in message["content"]]
    return [part["image_url"]["url"] for part in parts if part["type"] == "image_url"]


def test_what_is_refused(path: Path, tasks: dict[str, Path], tmp_path: Path, model_folders: dict[str, Path]) -> None:
    plain = written(random_bundle(), tmp_path / "plain.safetensors")
    server = FakeServer(read_bundle(path).digest)
    questions = ("--questions", tasks["counts"])
    with imitated_server(server.answer) as url:
        for arguments, problem in (
            ((plain, *questions, "--url", url), "plain.safetensors: the bundle has no relevance gate"),
            ((path, *questions, "--url", "127.0.0.1:1"), "--url must be an http or https address"),
            ((path, *questions, "--url", "http://127.0.0.1:1"), "cannot be reached"),
            ((path, *questions, "--model", model_folders["qwen3-vl"]), "another backbone"),
        ):
            assert problem in refuse("eval", "--gate", *arguments)
        server.trace = None
        assert "has no trace of the gate" in refuse("eval", "--gate", path, *questions, "--url", url)
        server.trace, server.name = {}, "elsewhere"
        command("eval", "--gate", path, *questions, "--url", url)
        server.digest = "0" * 64
        refused = refuse("eval", "--gate", path, *questions, "--url", url)
        assert f"has no bundle of the digest {read_bundle(path).digest}" in refused
        server.name = "both"
        assert f"serves another version as 'both', {server.digest}" in refuse(
            *("eval", "--gate", path, *questions, "--url", url)
        )
