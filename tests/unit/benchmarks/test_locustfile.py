"""The locust file as its users start it. (locust patches the process that imports it.)"""

import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

LOCUSTFILE = Path(__file__).parents[3] / "benchmarks" / "serving" / "locustfile.py"
USAGE = b'data: {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 32}}\n\n'
EVENTS = b'data: {"choices": [{"token_ids": [1]}]}\n\n' * 32 + USAGE + b"data: [DONE]\n\n"


class Answering(BaseHTTPRequestHandler):
    """Streams the same tokens to everybody."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.end_headers()
        self.wfile.write(EVENTS)

    def log_message(self, *arguments: Any) -> None:
        pass


def run(port: int, seconds: int = 2) -> subprocess.CompletedProcess[str]:
    host = ["--host", f"http://127.0.0.1:{port}"]
    command = [sys.executable, "-m", "locust", "-f", LOCUSTFILE, *host, "--headless", "-u", "1", "-t", f"{seconds}s"]
    return subprocess.run(command, cwd=LOCUSTFILE.parents[2], capture_output=True, text=True)


def test_a_run_with_answers_succeeds() -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Answering) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        ended = run(server.server_port)
        server.shutdown()
    assert ended.returncode == 0, ended.stderr
    assert "TTFT" in ended.stderr
