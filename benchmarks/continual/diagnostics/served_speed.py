"""How fast the artifacts of finished runs answer, on the server that users run.

Every artifact is loaded into servers of the run's model (`benchmarks.continual.serving`, compiled by default, unlike
those of a run), and gets its tasks' test questions in streamed requests of a fixed number of generated tokens
(`benchmarks.serving.load`). Methods take turns in every round, so that a busy machine slows all of them alike; one
round warms up and is dropped. No question is sent twice, so neither prefix nor picture caches help anyone, and every
method gets as many questions of each task as the others. What the client computes before a request (a gate's decision,
which exemplars to show) is not in the times; the rows of such methods have a note.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

from benchmarks.chat import messages_of
from benchmarks.continual.answering import Ask
from benchmarks.continual.answering.endpoint import LOADS, EndpointFailed
from benchmarks.continual.answering.http import Endpoints, HttpAnswerer, Served
from benchmarks.continual.methods import Method, choose_methods
from benchmarks.continual.results import Finished, FinishedRun
from benchmarks.continual.serving import Needs, own_servers
from benchmarks.continual.suites import TaskData
from benchmarks.server_process import ServerFailed
from benchmarks.serving.load import Block, RequestFailed, chat_body, send_requests
from benchmarks.serving.report import summarize
from inducekv_vllm.errors import ConfigError
from selector.data.examples import Example

GATE_NOT_TIMED = "the gate's verdict is not in the times"
NOT_TIMED: Mapping[str, str] = {
    "exemplars": "finding the exemplars to show is not in the times",
    "gated_adapter": GATE_NOT_TIMED,
    "gated_adapters": GATE_NOT_TIMED,
}
COMPILED = ("--no-enforce-eager",)
NO_MODEL = "its answers come from no model: there is nothing to serve"


@dataclass(frozen=True)
class Load:
    """What is sent."""

    concurrency: int
    requests: int  # of each method in a round
    rounds: int
    output_tokens: int

    def __post_init__(self) -> None:
        """Raises ConfigError: a number is out of range."""
        if min(self.concurrency, self.requests, self.rounds) < 1 or self.output_tokens < 2:
            raise ConfigError(f"at least one request and round, and two tokens, found {self}")

    @property
    def questions(self) -> int:
        """Of each method, with those of the round that warms up."""
        return (self.rounds + 1) * self.requests


class NotServed(RuntimeError):
    """An artifact cannot be served in this way; the message is the reason."""


@dataclass(frozen=True)
class Ready:
    """An artifact on its server, with the requests that it gets."""

    requests: Sequence[tuple[Served, Ask]]  # with the model that each goes to

    def send(self, load: Load, number: int) -> Block:
        """Block number `number`. Raises RequestFailed: a request was refused or broken off."""
        requests = [
            (model.url, chat_body(model.name, messages_of(ask.conversation), load.output_tokens, {}))
            for model, ask in self.requests[number * load.requests : (number + 1) * load.requests]
        ]
        try:
            return asyncio.run(send_requests(requests, load.concurrency))
        except ExceptionGroup as failures:
            raise RequestFailed(str(failures.exceptions[0])) from failures


def measure_speeds(
    finished: Finished, runs: Sequence[FinishedRun], load: Load, serve_args: Sequence[str]
) -> list[dict[str, Any]]:
    """Of each run's last artifact, on servers of the run's model: rows of `row_of`, or with the reason in "why"."""
    methods, budget = [method_of(run) for run in runs], max(run.budget for run in runs)
    needs = Needs(finished.model, finished.suite, methods, budget, jobs=sum(map(adapters_of, runs)))
    logs = finished.out / "diagnostics"
    logs.mkdir(parents=True, exist_ok=True)
    try:
        with own_servers(needs, finished.out, logs, [*COMPILED, *serve_args]) as endpoints:
            return measure_on(endpoints, finished, runs, load)
    except (EndpointFailed, ServerFailed, RequestFailed) as error:
        raise ConfigError(f"the speed could not be measured: {error}") from error


def measure_on(
    endpoints: Endpoints, finished: Finished, runs: Sequence[FinishedRun], load: Load
) -> list[dict[str, Any]]:
    """The same on running endpoints."""
    answerer = HttpAnswerer(finished.model, endpoints)
    shares = share_questions(finished.suite.tasks, len(runs), load.questions)
    rows: dict[int, dict[str, Any]] = {}
    ready: dict[int, Ready] = {}
    with ExitStack() as stack:
        for number, (run, questions) in enumerate(zip(runs, shares, strict=True)):
            try:
                ready[number] = stack.enter_context(serve(answerer, run, questions))
                ready[number].send(load, 0)  # warms up
            except (NotServed, RequestFailed) as error:
                rows[number] = {"why": str(error), "note": None}
        counted = [number for number in range(len(runs)) if number not in rows]
        rounds = [[ready[number].send(load, turn) for number in counted] for turn in range(1, load.rounds + 1)]
    for number, *blocks in zip(counted, *rounds, strict=True):
        rows[number] = row_of(blocks, NOT_TIMED.get(runs[number].artifact().kind))
    return [rows[number] for number in range(len(runs))]


@contextmanager
def serve(answerer: HttpAnswerer, run: FinishedRun, questions: Sequence[Example]) -> Iterator[Ready]:
    """The run's last artifact, loaded, and its plan's requests. Raises NotServed: the reason why there are none."""
    with ExitStack() as stack:
        try:
            model = answerer.prepare(run.artifact(), run.state())
            asks = model.plan.asks(questions)
            if any(ask.answer is not None for ask in asks):
                raise NotServed(NO_MODEL)
            models = stack.enter_context(model.loaded(asks))
        except (ConfigError, EndpointFailed) as error:
            raise NotServed(str(error)) from error
        yield Ready(list(zip(models, asks, strict=True)))


def share_questions(tasks: Sequence[TaskData], parts: int, count: int) -> list[list[Example]]:
    """`count` test questions for each of `parts` methods, none twice. Raises ConfigError: a task has too few."""
    each = math.ceil(count / len(tasks))
    different = [list({e.source_digest: e for e in task.test}.values()) for task in tasks]
    for task, questions in zip(tasks, different, strict=True):
        if len(questions) < parts * each:
            raise ConfigError(
                f"{parts} methods with {count} requests each need {parts * each} different test questions of every "
                f"task, {task.name} has {len(questions)}: fewer --rounds or --requests"
            )
    return [
        [different[number % len(tasks)][number // len(tasks) * parts + part] for number in range(count)]
        for part in range(parts)
    ]


def row_of(blocks: Sequence[Block], note: str | None) -> dict[str, Any]:
    """Medians: times over all requests, throughput over blocks."""
    summary = summarize(list(blocks))
    copied = ("requests", "prompt_tokens", "ttft_ms", "ttft_iqr_ms", "tpot_ms", "tokens_per_s")
    return {name: summary[name] for name in copied} | {
        "why": None,
        "note": note,
        "decode_tokens_per_s": 1000 / summary["tpot_ms"],
        "requests_per_s": median(len(block.timings) / block.seconds for block in blocks),
    }


def method_of(run: FinishedRun) -> Method:
    """The method with the settings of the run."""
    settings = {name: value for name, value in run.matrix["settings"].items() if name != "name"}
    return choose_methods([run.method], [f"{name}={json.dumps(value)}" for name, value in settings.items()])[0]


def adapters_of(run: FinishedRun) -> int:
    """How many adapters its answers may need at the same time."""
    kind = method_of(run).kind
    if LOADS[kind] != "adapter":
        return 0
    return len(run.order) if kind == "gated_adapters" else 1
