"""The locust file as its users start it. (locust patches the process that imports it.)"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

LOCUSTFILE = Path(__file__).parents[3] / "benchmarks" / "serving" / "locustfile.py"
USAGE = b'data: {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 32}}\n\n'
EVENTS = b'data: {"choices": [{"token_ids": [1]}]}\n\n' * 32 + USAGE + b"data: [DONE]\n\n"
REPLY = b'{"choices": [{"message": {"content": "red"}}]}'


class Answering(BaseHTTPRequestHandler):
    """Streams the same tokens to everybody; keeps what was asked."""

    bodies: ClassVar[list[dict[str, Any]]] = []

    def do_POST(self) -> None:
        self.bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(200)
        self.end_headers()
        self.wfile.write(EVENTS if self.bodies[-1].get("stream") else REPLY)

    def log_message(self, *arguments: Any) -> None:
        pass


def run(port: int, *more: object, seconds: int = 2) -> subprocess.CompletedProcess[str]:
    host = ["--host", f"http://127.0.0.1:{port}"]
    command = [sys.executable, "-m", "locust", "-f", LOCUSTFILE, *host, "--headless", "-u", "1", "-t", f"{seconds}s"]
    command += map(str, more)
    return subprocess.run(command, cwd=LOCUSTFILE.parents[2], capture_output=True, text=True)


def test_a_run_without_an_answer_fails() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:  # takes connections, and never answers
        ended = run(listener.getsockname()[1])
    assert ended.returncode == 1
    assert "no request was answered" in ended.stderr


def test_a_run_with_answers_succeeds() -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Answering) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        ended = run(server.server_port)
        server.shutdown()
    assert ended.returncode == 0, ended.stderr
    assert "TTFT" in ended.stderr


def test_blocks_are_sent_one_after_the_other_and_their_requests_together(tmp_path: Path) -> None:
    blocks, timings = tmp_path / "blocks", tmp_path / "timings"
    body = {"model": "m", "messages": [{"role": "user", "content": "a"}], "max_tokens": 32, "stream": True}
    turn = {"role": "user", "content": "b"}
    planned = [
        {"method": "one", "concurrency": 1, "requests": [{"body": body, "then": turn}]},
        {"method": "two", "concurrency": 2, "requests": [{"body": body}] * 4},
    ]
    given = ("--blocks", blocks, "--timings", timings)
    with ThreadingHTTPServer(("127.0.0.1", 0), Answering) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        Answering.bodies.clear()
        blocks.write_text("".join(json.dumps(block) + "\n" for block in planned))
        ended = run(server.server_port, *given, seconds=120)  # ends after the last block
        asked = [len(each["messages"]) for each in Answering.bodies]
        blocks.write_text(json.dumps({**planned[0], "requests": [{"body": body | {"max_tokens": 33}}]}) + "\n")
        failed = run(server.server_port, "--blocks", blocks, "--timings", tmp_path / "none", seconds=120)
        server.shutdown()
    assert ended.returncode == 0, ended.stderr
    one, two = (json.loads(line) for line in timings.read_text().splitlines())
    assert (one["method"], len(one["requests"]), len(two["requests"])) == ("one", 1, 4)
    assert asked == [1, 3, 1, 1, 1, 1]  # the first turn, the second with its answer, and the next block
    for timing in (*one["requests"], *two["requests"]):
        assert 0 < timing["ttft"] < one["seconds"] + two["seconds"]
        assert timing["tpot"] >= 0
        assert (timing["prompt_tokens"], timing["output_tokens"]) == (7, 32)
    assert failed.returncode == 1
    assert "asked for 33 tokens, got 32" in failed.stdout + failed.stderr
