"""A server over HTTP that answers as a function says."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass(frozen=True)
class Request:
    path: str
    headers: Any
    body: Any  # None without one
    method: str = "GET"


@contextmanager
def imitated_server(answer: Callable[[Request], tuple[int, Any] | None]) -> Iterator[str]:
    """Yields the address; `answer` gives the status and, as JSON, the body; of a redirect, where to; None hangs up."""

    class Handler(BaseHTTPRequestHandler):
        def reply(self) -> None:
            sent = self.rfile.read(int(self.headers.get("Content-Length", "0")))
            body = json.loads(sent) if sent else None
            if (found := answer(Request(self.path, self.headers, body, self.command))) is None:
                return
            status, answered = found
            self.send_response(status)
            if 300 <= status < 400:
                self.send_header("Location", answered)
            content = json.dumps(answered).encode()
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST = do_PATCH = do_DELETE = reply

        def log_message(self, *_: Any) -> None: ...

    class Server(ThreadingHTTPServer):
        request_queue_size = 64

    with Server(("127.0.0.1", 0), Handler) as http:
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{http.server_port}"
        finally:
            http.shutdown()
            thread.join()
