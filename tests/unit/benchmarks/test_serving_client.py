"""The serving benchmark's client: what it takes of a streamed answer, and what it does not accept."""

import asyncio
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

import pytest

from benchmarks.serving.client import ask_together, session, trace
from benchmarks.serving.timing import RequestFailed, Streamed, Timing, timing

TOKEN = b'data: {"choices": [{"token_ids": [1]}]}'
USAGE = b'data: {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 3}}'
REPLY = {"choices": [{"message": {"content": "red"}}]}
BODY = {"model": "m", "messages": [{"role": "user", "content": "a"}], "max_tokens": 3, "stream": True}


class Answering(BaseHTTPRequestHandler):
    """Streams the same tokens to everybody, refuses the model "none"; keeps what was asked."""

    protocol_version = "HTTP/1.1"
    bodies: ClassVar[list[dict[str, Any]]] = []

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.bodies.append(body)
        reply = REPLY | {"kv_transfer_params": {"inducekv": {"gate": {"open": True}, "start": 6}}}
        sent = (
            b"\n\n".join([TOKEN] * 3 + [USAGE, b"data: [DONE]", b""])
            if "stream" in body
            else json.dumps(reply).encode()
        )
        self.send_response(404 if body["model"] == "none" else 200)
        self.send_header("Content-Type", "text/event-stream" if "stream" in body else "application/json")
        self.send_header("Content-Length", str(len(sent)))
        self.end_headers()
        self.wfile.write(sent)

    def log_message(self, *arguments: Any) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Answering) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        Answering.bodies.clear()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def asked(url: str, requests: list[dict[str, Any]], concurrency: int) -> tuple[float, list[Timing], list[str]]:
    async def ask() -> tuple[float, list[Timing], list[str]]:
        async with session() as client:
            return await ask_together(client, url, requests, concurrency)

    return asyncio.run(ask())


def test_times_are_those_of_the_first_token_and_of_each_after_it() -> None:
    lines = [(10.5, b": comment"), (11.0, TOKEN), (11.2, TOKEN), (11.6, TOKEN), (11.7, USAGE), (12.0, b"data: [DONE]")]
    assert timing(Streamed(10.0, lines), 3) == Timing(1.0, pytest.approx(0.3), 7, 3)


def test_an_answer_that_is_cut_short_or_an_error_is_no_time() -> None:
    with pytest.raises(RequestFailed, match="asked for 4 tokens, got 3"):
        timing(Streamed(0.0, [(1.0, TOKEN), (1.1, USAGE)]), 4)
    with pytest.raises(RequestFailed, match="no room"):
        timing(Streamed(0.0, [(1.0, b'data: {"error": {"message": "no room"}}')]), 3)
    with pytest.raises(RequestFailed, match="got 0"):
        timing(Streamed(0.0, []), 3)


def test_requests_of_a_block_are_all_timed(url: str) -> None:
    seconds, timings, failed = asked(url, [{"body": BODY}] * 5, 2)
    assert failed == []
    assert [each[2:] for each in timings] == [(7, 3)] * 5
    assert all(0 < each.ttft < seconds and each.tpot >= 0 for each in timings)


def test_a_second_turn_is_asked_after_its_first(url: str) -> None:
    _, timings, failed = asked(url, [{"body": BODY, "then": {"role": "user", "content": "b"}}], 1)
    assert (len(timings), failed) == (1, [])
    first, second = Answering.bodies
    assert "stream" not in first
    assert [message["content"] for message in second["messages"]] == ["a", "red", "b"]


def test_a_gate_is_asked_what_it_decided(url: str) -> None:
    async def ask(model: str) -> dict[str, Any]:
        async with session() as client:
            return await trace(client, url, BODY | {"model": model})

    assert asyncio.run(ask("m")) == {"open": True, "start": 6}
    assert Answering.bodies[-1]["vllm_xargs"] == {"inducekv_trace": 1}
    assert "HTTP 404" in asyncio.run(ask("none"))["failed"]
