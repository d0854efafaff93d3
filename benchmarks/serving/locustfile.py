"""The load generator over HTTP: locust, with streamed requests whose first token and pace are timed.

    locust -f benchmarks/serving/locustfile.py --host http://127.0.0.1:8000 \\
        --headless -u 16 -r 4 -t 60s --model-name NAME

`--model-name` is the base model's name (no memory) or a bundle's. Locust lists TTFT, TPOT and whole requests; its
own POST line ends with the response's headers. A run without a single answer fails. Pictures repeat, so the later keys
of a memory come from its cache.
"""

from __future__ import annotations

import sys
import time
from argparse import ArgumentParser
from functools import cache
from typing import Any

import gevent
from locust import HttpUser, constant, events, task
from urllib3 import PoolManager

from benchmarks.chat import chat_body, question_of, user_turn
from benchmarks.demo.world import examples
from benchmarks.serving.timing import RequestFailed, Streamed, timing
from server.demo import CHECKPOINT

PICTURES = 64
CONNECTIONS = 256  # kept open; urllib3 would keep 10, and warn of each further one


def add_options(parser: ArgumentParser) -> None:
    parser.add_argument("--model-name", default=str(CHECKPOINT), help="the served name: the base model's or a bundle's")
    parser.add_argument("--task", default="guild", help="the demo task whose test pictures are asked about")
    parser.add_argument("--output-tokens", type=int, default=32)


@cache
def questions(task_name: str) -> list[tuple[dict[str, Any], Any]]:
    """The records and pictures that all users ask about."""
    return list(examples(task_name, "test", PICTURES))


def draw_pictures(environment: Any, **_: Any) -> None:
    """Before the clock of `-t` runs."""
    options = environment.parsed_options
    if options is not None:
        questions(options.task)
        gevent.get_hub().loop.update_now()  # gevent would start the clock at the time before the drawing


def fail_if_empty(environment: Any, **_: Any) -> None:
    if environment.stats.total.num_requests == 0:
        print("no request was answered: is the server there, and the run long enough?", file=sys.stderr)
        environment.process_exit_code = 1


events.init_command_line_parser.add_listener(add_options)
events.init.add_listener(draw_pictures)
events.quitting.add_listener(fail_if_empty)


class VisualQuestionUser(HttpUser):
    """Asks one question after the other, without a pause."""

    wait_time = constant(0)
    pool_manager = PoolManager(maxsize=CONNECTIONS)

    def on_start(self) -> None:
        self.number_asked = 0

    @task
    def ask(self) -> None:
        options = self.environment.parsed_options
        asked = questions(options.task)
        record, pixels = asked[self.number_asked % len(asked)]
        self.number_asked += 1
        messages = [user_turn(pixels, question_of(record))]
        self.stream(chat_body(options.model_name, messages, options.output_tokens, {}))

    def stream(self, body: dict[str, Any]) -> None:
        """Ask, and report the times to the first token and for each one after it, if there are more."""
        streamed = Streamed(time.perf_counter(), [])
        with self.client.post("/v1/chat/completions", json=body, stream=True, catch_response=True) as response:
            if response.status_code != 200:
                self._fail(response, f"HTTP {response.status_code}: {response.text[:200]}")
                return
            for line in response.iter_lines():
                streamed.lines.append((time.perf_counter(), line))
            try:
                found = timing(streamed, body["max_tokens"])
            except RequestFailed as error:
                self._fail(response, str(error))
                return
        self._report("whole request", time.perf_counter() - streamed.start)
        self._report("TTFT", found.ttft)
        if found.output_tokens > 1:
            self._report("TPOT", found.tpot)

    def _fail(self, response: Any, why: str) -> None:
        print(why, file=sys.stderr)
        response.failure(why)

    def _report(self, name: str, seconds: float) -> None:
        numbers = {"response_time": 1000 * seconds, "response_length": 0}
        self.environment.events.request.fire(request_type="stream", name=name, exception=None, context={}, **numbers)
