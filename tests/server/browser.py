"""A headless Chromium, driven by its DevTools protocol."""

import base64
import itertools
import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from websockets.sync.client import ClientConnection, connect

NAMES = ("chromium", "chromium-browser", "google-chrome")
PROGRAM = next((found for name in NAMES if (found := shutil.which(name))), None)
PORT_FILE = "DevToolsActivePort"


@dataclass
class Page:
    """One open page."""

    connection: ClientConnection
    session: str
    said: list[str] = field(default_factory=list)  # errors of its script
    _numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self._numbers)
        self.connection.send(json.dumps({"id": number, "method": method, "params": params, "sessionId": self.session}))
        while True:
            message = json.loads(self.connection.recv(timeout=60))
            if message.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded"):
                self.said.append(json.dumps(message["params"]))
            if message.get("id") == number:
                assert "error" not in message, message
                return dict(message["result"])

    def run(self, script: str) -> Any:
        """The value of an expression, a promise's once it has one."""
        found = self.send("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def wait_for(self, script: str, seconds: float = 60) -> None:
        """Until an expression is true."""
        end = time.monotonic() + seconds
        while not self.run(script):
            assert time.monotonic() < end, f"never true: {script}; {self.run('document.body.innerText')}"
            time.sleep(0.1)

    def screenshot(self, path: Path) -> None:
        size = {"captureBeyondViewport": True}
        path.write_bytes(base64.b64decode(self.send("Page.captureScreenshot", format="png", **size)["data"]))

    def look(self, width: int, *, dark: bool) -> None:
        """As on a window of this width."""
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[scheme])

    def press(self, key: str, code: int) -> None:
        for kind in ("keyDown", "keyUp"):
            text = {"text": "\r"} if key == "Enter" and kind == "keyDown" else {}
            self.send("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code, **text)


@contextmanager
def opened(url: str, folder: Path) -> Iterator[Page]:
    """The page at this address; the browser's files go into `folder`."""
    assert PROGRAM is not None
    flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0"]
    process = subprocess.Popen(
        [PROGRAM, *flags, f"--user-data-dir={folder}", "about:blank"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        end = time.monotonic() + 60
        while not (folder / PORT_FILE).exists() or len((folder / PORT_FILE).read_text().split()) < 2:
            assert time.monotonic() < end
            time.sleep(0.1)
        port, path = (folder / PORT_FILE).read_text().split()
        with connect(f"ws://127.0.0.1:{port}{path}", max_size=None) as connection:
            browser = Page(connection, "")
            target = _call(connection, "Target.createTarget", url="about:blank")["targetId"]
            session = _call(connection, "Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
            page = Page(connection, session, browser.said)
            for domain in ("Page", "Runtime", "Log"):
                page.send(f"{domain}.enable")
            page.send("Page.navigate", url=url)
            page.wait_for("document.readyState === 'complete'")
            yield page
    finally:
        process.terminate()
        process.wait(30)


def _call(connection: ClientConnection, method: str, **params: Any) -> dict[str, Any]:
    """Of the browser, outside of any page."""
    connection.send(json.dumps({"id": 0, "method": method, "params": params}))
    while (message := json.loads(connection.recv(timeout=60))).get("id") != 0:
        pass
    return dict(message["result"])
