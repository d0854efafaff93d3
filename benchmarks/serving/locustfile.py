"""The load generator over HTTP: locust, with streamed requests whose first token and pace are timed.

    locust -f benchmarks/serving/locustfile.py --host http://127.0.0.1:8000 \\
        --headless -u 16 -r 4 -t 60s --model-name NAME

`--model-name` is the base model's name (no memory) or a bundle's. Locust lists TTFT, TPOT and whole requests; its
own POST line ends with the response's headers. A run without a single answer fails. Pictures repeat, so the later keys
of a memory come from its cache.

`python -m benchmarks.serving.run`, which compares methods side by side, drives it with `--blocks FILE`: JSON lines,
each with the requests of one method that are sent together. The next block begins when the last answer of the one
before is there, and `--timings FILE` gets a JSON line for each. A request that fails ends the run with status 1.
"""

from __future__ import annotations

import json
import sys
import time
from argparse import ArgumentParser
from functools import cache
from typing import Any

import gevent
from gevent.pool import Pool
from locust import HttpUser, constant, events, task
from urllib3 import PoolManager

from benchmarks.chat import chat_body, question_of, user_turn
from benchmarks.demo.world import examples
from server.demo import CHECKPOINT

PICTURES = 64
CONNECTIONS = 256  # kept open; urllib3 would keep 10, and warn of each further one
FIRST_ANSWER_TOKENS = 8  # of a conversation whose second turn is measured


def add_options(parser: ArgumentParser) -> None:
    parser.add_argument("--model-name", default=str(CHECKPOINT), help="the served name: the base model's or a bundle's")
    parser.add_argument("--task", default="guild", help="the demo task whose test pictures are asked about")
    parser.add_argument("--output-tokens", type=int, default=32)
    parser.add_argument("--blocks", default="", help="of benchmarks.serving.run: what is sent instead")
    parser.add_argument("--timings", default="", help="where the times of the blocks go")


@cache
def questions(task_name: str) -> list[tuple[dict[str, Any], Any]]:
    """The records and pictures that all users ask about."""
    return list(examples(task_name, "test", PICTURES))


def draw_pictures(environment: Any, **_: Any) -> None:
    """Before the clock of `-t` runs."""
    options = environment.parsed_options
    if options is not None and not options.blocks:
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
    """Asks one question after the other, without a pause; or is the only one of a run of blocks, and sends these."""

    wait_time = constant(0)
    pool_manager = PoolManager(maxsize=CONNECTIONS)

    def on_start(self) -> None:
        self.number_asked = 0

    @task
    def ask(self) -> None:
        options = self.environment.parsed_options
        if options.blocks:
            self.send_blocks(options.blocks, options.timings)
            return
        asked = questions(options.task)
        record, pixels = asked[self.number_asked % len(asked)]
        self.number_asked += 1
        messages = [user_turn(pixels, question_of(record))]
        self.stream(chat_body(options.model_name, messages, options.output_tokens, {}))

    def send_blocks(self, blocks: str, timings: str) -> None:
        with open(blocks) as lines, open(timings, "w") as out:
            for line in lines:
                block = json.loads(line)
                together = Pool(block["concurrency"])
                bodies = together.map(self.second_turn, block["requests"])
                start = time.perf_counter()
                found = together.map(self.stream, bodies)
                seconds = time.perf_counter() - start
                if None in found:
                    self.environment.process_exit_code = 1
                    break
                row = {"method": block["method"], "seconds": seconds, "requests": found}
                print(json.dumps(row), file=out, flush=True)
        self.environment.runner.quit()

    def second_turn(self, request: dict[str, Any]) -> dict[str, Any]:
        """What is measured: the request, or the turn that follows it, once the first one has been answered here."""
        body, then = request["body"], request.get("then")
        if then is None:
            return body
        first = {key: value for key, value in body.items() if not key.startswith("stream")}
        reply = self.client.post("/v1/chat/completions", json=first | {"max_tokens": FIRST_ANSWER_TOKENS}).json()
        answer = {"role": "assistant", "content": reply["choices"][0]["message"]["content"]}
        return body | {"messages": [*body["messages"], answer, then]}

    def stream(self, body: dict[str, Any]) -> dict[str, float] | None:
        """Seconds to the first token and for each one after it (None: a single token); None: the request failed."""
        start, arrivals, usage = time.perf_counter(), [], {}
        with self.client.post("/v1/chat/completions", json=body, stream=True, catch_response=True) as response:
            if response.status_code != 200:
                return self._fail(response, f"HTTP {response.status_code}: {response.text[:200]}")
            for line in response.iter_lines():
                chunk = json.loads(line[len(b"data: ") :]) if line.startswith(b"data: {") else {}
                if "error" in chunk:
                    return self._fail(response, str(chunk["error"]))
                if any(choice.get("token_ids") for choice in chunk.get("choices", ())):
                    arrivals.append(time.perf_counter())
                usage = chunk.get("usage") or usage
            tokens = usage.get("completion_tokens", len(arrivals))
            if tokens < body["max_tokens"] or not arrivals:
                return self._fail(response, f"asked for {body['max_tokens']} tokens, got {tokens}")
        self._report("whole request", time.perf_counter() - start)
        ttft = arrivals[0] - start
        self._report("TTFT", ttft)
        tpot = (arrivals[-1] - arrivals[0]) / (tokens - 1) if tokens > 1 else None
        if tpot is not None:
            self._report("TPOT", tpot)
        return {"ttft": ttft, "tpot": tpot, "prompt_tokens": usage.get("prompt_tokens", 0), "output_tokens": tokens}

    def _fail(self, response: Any, why: str) -> None:
        print(why, file=sys.stderr)
        response.failure(why)

    def _report(self, name: str, seconds: float) -> None:
        numbers = {"response_time": 1000 * seconds, "response_length": 0}
        self.environment.events.request.fire(request_type="stream", name=name, exception=None, context={}, **numbers)
