"""Operating points and the Pareto front: on a server whose speed is known, and (slow) on the real one."""

import json
import time
from contextlib import contextmanager
from typing import ClassVar

import pytest

from benchmarks.continual.__main__ import main as run_benchmark
from benchmarks.continual.answering.endpoint import Endpoint
from benchmarks.continual.answering.http import Endpoints
from benchmarks.continual.diagnostics import served_speed
from benchmarks.continual.diagnostics.served_speed import Load, adapters_of, measure_on, method_of, row_of
from benchmarks.continual.diagnostics.speed import pareto_finding, with_front
from benchmarks.continual.methods import Artifact, RunContext
from benchmarks.continual.methods.neighbours import KnnCopier
from benchmarks.continual.results import Finished
from benchmarks.serving.load import Block, Timing
from inducekv_vllm.errors import ConfigError
from selector.update.build import build_bundle
from selector.update.settings import BuildSettings
from server.demo import CHECKPOINT
from tests.benchmarks.fake_server import FakeHandler, serving
from tests.benchmarks.finished_runs import diagnose, refusal, write_configuration, write_run
from tests.benchmarks.small_streams import ORDER

# Seconds until the first token, and from one to the next.
PLAIN, WITH_MEMORY, BETWEEN = 0.02, 0.2, 0.02


class KnownSpeed(FakeHandler):
    """Streams as vLLM does; a memory, which has a name of the client's choice, is slower. It loads no adapters."""

    received: ClassVar[list[tuple[str, dict]]] = []

    def do_POST(self):
        body = self.body()
        self.received.append((self.path, body))
        if "lora" in self.path:
            self.send_error(400, "no adapters here")
            return
        self.send_response(200)
        self.end_headers()
        if self.path == "/v1/chat/completions":
            time.sleep(PLAIN if body["model"] == "untouched" else WITH_MEMORY)
            for number in range(body["max_tokens"]):
                time.sleep(BETWEEN if number else 0)
                self.event({"choices": [{"token_ids": [1]}]})
            self.event({"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": body["max_tokens"]}})

    def event(self, chunk):
        self.wfile.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
        self.wfile.flush()


@pytest.fixture
def endpoints():
    KnownSpeed.received.clear()
    with serving(KnownSpeed) as url:
        endpoint = Endpoint(url, "untouched")
        yield Endpoints(endpoint, endpoint)


@pytest.fixture(scope="module")
def data(demo_suite):
    return demo_suite(12, 4, 12, *ORDER)


@pytest.fixture(scope="module")
def memories(data, demo_backbone):
    examples = [task.train[0] for task in data[1].tasks]
    return [build_bundle(demo_backbone, examples, BuildSettings(budget=2))] * 2


@pytest.fixture
def out(data, memories, tmp_path):
    """Runs that a server can load (none, refined), and that it cannot (lora, knn_copier)."""

    def write(method, score, **more):
        return write_run(tmp_path, method, ORDER, metrics={"AP": score, "AF": 0.1}, **more) / "01-field/state"

    write_configuration(tmp_path, *data)
    write("no_memory", 0.1)
    for seed, score in enumerate((0.6, 0.8)):
        write("refined", score, seed=seed, bundles=memories, stored_bytes=[2048] * 2)
    Artifact("adapter", "adapter", 512, {}).write(write("lora", 0.9))
    copier = write("knn_copier", 0.3)
    context = RunContext(CHECKPOINT, budget=2, seed=0, number=0, num_tasks=2)
    KnnCopier().learn(data[1].tasks[0], None, copier, context).write(copier)
    return tmp_path


def runs_of(out, *methods):
    finished = Finished.read(out)
    return finished, [finished.runs(method)[0] for method in methods]


def test_times_are_those_of_the_server(endpoints, out):
    finished, runs = runs_of(out, "no_memory", "refined")
    plain, memory = measure_on(endpoints, finished, runs, Load(concurrency=1, requests=2, rounds=2, output_tokens=6))
    assert (plain["requests"], plain["prompt_tokens"]) == (4, 9)
    assert 1000 * PLAIN <= plain["ttft_ms"] < 1000 * WITH_MEMORY <= memory["ttft_ms"]
    for row, first in ((plain, PLAIN), (memory, WITH_MEMORY)):
        assert 0.2 / BETWEEN < row["decode_tokens_per_s"] <= 1.05 / BETWEEN
        longest = 1 / (first + 5 * BETWEEN)
        assert 0.2 * longest < row["requests_per_s"] <= longest
        assert row["tokens_per_s"] == pytest.approx(6 * row["requests_per_s"])
    asked = [body for path, body in KnownSpeed.received if path == "/v1/chat/completions"]
    assert [body["model"] == "untouched" for body in asked] == 3 * [True, True, False, False]  # they take turns
    prompts = [json.dumps(body["messages"]) for body in asked]
    assert len(set(prompts)) == len(prompts)  # nothing is asked twice
    loaded, unloaded = (
        [b["name"] for path, b in KnownSpeed.received if f"/{how}_" in path] for how in ("load", "unload")
    )
    assert len(loaded) == 1
    assert loaded == unloaded == sorted({body["model"] for body in asked} - {"untouched"})


def test_requests_at_the_same_time_add_up(endpoints, out):
    finished, runs = runs_of(out, "refined")
    loads = [Load(concurrency, requests=4, rounds=1, output_tokens=2) for concurrency in (1, 4)]
    (one,), (four,) = (measure_on(endpoints, finished, runs, load) for load in loads)
    assert one["tokens_per_s"] <= 2 / (WITH_MEMORY + BETWEEN)
    assert four["tokens_per_s"] > 1.5 * one["tokens_per_s"]


def test_what_cannot_be_served_says_why(endpoints, out):
    finished, runs = runs_of(out, "lora", "knn_copier", "no_memory")
    load = Load(concurrency=1, requests=2, rounds=1, output_tokens=2)
    lora, copier, plain = measure_on(endpoints, finished, runs, load)
    assert "HTTP 400" in lora["why"]
    assert copier == {"why": served_speed.NO_MODEL, "note": None}
    assert plain["why"] is None


@pytest.fixture
def known_server(endpoints, monkeypatch):
    """Instead of servers of one's own; the flags that they would have got are kept."""
    given = []

    @contextmanager
    def started(needs, out, logs, more):
        given.append((needs, more))
        yield endpoints

    monkeypatch.setattr(served_speed, "own_servers", started)
    return given


FEW = ("--requests", "2", "--rounds", "1", "--output-tokens", "3")


def test_the_front_is_drawn_over_scores_and_measured_speeds(known_server, out):
    write_run(out, "no_memory", ORDER, budget=64)
    found = diagnose("pareto", out, *FEW, "--concurrency", "2")
    points = {point["method"]: point for point in found["points"]}
    # The untouched model is faster and stands once, whatever its budgets; the memory is better.
    on_front = [("knn_copier", None), ("lora", None), ("no_memory", True), ("refined", True)]
    assert [(point["method"], point["on_front"]) for point in found["points"]] == on_front
    assert points["refined"]["AP"]["mean"] == pytest.approx(0.7)
    assert (points["refined"]["seeds"], points["refined"]["bytes"]) == ([0, 1], 2048)
    assert points["no_memory"]["tokens_per_s"] > points["refined"]["tokens_per_s"]
    assert "Not measured: knn_copier: its answers come from no model" in found["finding"]
    assert found["load"]["concurrency"] == 2
    ((needs, flags),) = known_server
    assert (needs.budget, needs.jobs, list(flags)) == (32, 1, ["--no-enforce-eager"])


def test_operating_points_stand_beside_the_untouched_model(known_server, out, memories):
    metrics = {"AP": 0.9, "AF": 0.0}
    write_run(out, "refined", ORDER, budget=64, bundles=memories, stored_bytes=[4096] * 2, metrics=metrics)
    found = diagnose("operating_points", out, *FEW)
    assert [(point["budget"], point["bytes"]) for point in found["budgets"]] == [(32, 2048), (64, 4096)]
    assert [point["AP"]["mean"] for point in found["budgets"]] == pytest.approx([0.7, 0.9])
    assert found["untouched"]["ttft_ms"] < min(point["ttft_ms"] for point in found["budgets"])
    assert "32 entries (2 KiB): AP 0.700" in found["finding"]
    assert found["load"] == {"concurrency": 1, "requests": 2, "rounds": 1, "output_tokens": 3}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("pareto", "--methods", "nonesuch"), "no finished run of nonesuch"),
        (("operating_points", "--method", "nonesuch"), "no finished run of nonesuch"),
        (("pareto", "--rounds", "0"), "at least one request and round"),
        (("pareto", "--requests", "99"), "fewer --rounds or --requests"),
        (("pareto", "--methods", "knn_copier", *FEW), "nothing could be served: its answers come from no model"),
    ],
)
def test_what_cannot_be_measured_is_named(known_server, out, arguments, message, capsys):
    name, *more = arguments
    assert message in refusal(capsys, name, out, *more)


def test_questions_are_shared_in_equal_parts_of_every_task(data):
    parts = served_speed.share_questions(data[1].tasks, 3, 7)
    assert [[example.task for example in part] for part in parts] == 3 * [["guild", "field"] * 3 + ["guild"]]
    assert len({example.id for part in parts for example in part}) == 21
    with pytest.raises(ConfigError, match=r"4 methods with 7 requests each need 16 different .* guild has 12"):
        served_speed.share_questions(data[1].tasks, 4, 7)


def test_a_row_is_made_of_medians():
    blocks = [Block([Timing(0.1, 0.02, 9, 10), Timing(0.3, 0.02, 9, 10)], 4.0), Block([Timing(0.2, 0.05, 9, 10)], 1.0)]
    row = row_of(blocks, "a note")
    assert row["ttft_ms"] == pytest.approx(200)
    assert row["decode_tokens_per_s"] == pytest.approx(50)
    assert row["tokens_per_s"] == pytest.approx((5 + 10) / 2)
    assert row["requests_per_s"] == pytest.approx((0.5 + 1) / 2)
    assert (row["note"], row["why"]) == ("a note", None)


def test_a_run_is_served_with_its_own_settings(out):
    write_run(out, "gated_lora_replay", ORDER, settings={"payload_tokens": 4, "learning_rate": 0.1})
    _, (refined, lora, gated) = runs_of(out, "refined", "lora", "gated_lora_replay")
    assert (method_of(gated).payload_tokens, method_of(gated).learning_rate) == (4, 0.1)
    assert (adapters_of(refined), adapters_of(lora)) == (0, 1)


def point(method, tokens_per_s, ap, why=None):
    measured = {"tokens_per_s": tokens_per_s, "AP": {"mean": ap}} if why is None else {}
    return {"method": method, "budget": 8, "why": why, **measured}


def test_hand_made_points_have_a_known_front():
    fast, lost = point("fast", 9.0, 0.1), point("lost", 0.0, 0.0, why="none")
    points = with_front([fast, lost, point("beaten", 4.0, 0.4), point("good", 5.0, 0.5)])
    assert [one["on_front"] for one in points] == [True, None, False, True]
    assert pareto_finding(points, 4) == (
        "With 4 requests at a time no method beats fast (8) with 9 tokens a second and AP 0.100; "
        "good (8) with 5 tokens a second and AP 0.500 in both speed and AP. Not measured: lost: none."
    )


@pytest.mark.slow
def test_speeds_are_measured_on_the_real_server(data, tmp_path):
    few = ["--set", "steps=2", "--set", "learning_rate=0.01", "--answer", "offline"]
    methods = ["no_memory", "lora_replay", "prompt_replay", "refined"]
    command = ["run", "--method", *methods, "--order", *ORDER, *few, "--budget", "8", "--jobs", "1"]
    assert run_benchmark([*command, "--data", str(data[0]), "--out", str(tmp_path)]) == 0
    found = diagnose("pareto", tmp_path, "--data", data[0], *FEW, "--serve-args", "--enforce-eager")
    points = {one["method"]: one for one in found["points"]}
    assert sorted(points) == sorted(methods)
    assert {name: one["why"] for name, one in points.items()} == dict.fromkeys(methods)
    assert points["prompt_replay"]["prompt_tokens"] > 2 * points["no_memory"]["prompt_tokens"]
    assert min(one["tokens_per_s"] for one in points.values()) > 0
