"""What a server's memory grows by while it is sent pictures of many pixels in few bytes.

    python -m benchmarks.pictures.memory [--output FILE]

The demo model; grey PNGs of one colour, the larger ones beyond the limit. Each is sent in a chat, alone and four at
once, to a server that was just started. Prints a line for each, and writes them as JSON.
"""

from __future__ import annotations

import argparse
import io
import json
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import httpx
import psutil
from PIL import Image

from benchmarks.machine import describe_machine
from benchmarks.server_process import serving
from selector.client import picture_part

RESULTS: Final = Path(__file__).parents[1] / "results" / "pictures_memory.json"
SIDES: Final = (3500, 7000, 13_000, 14_000)  # 12, 49, 169 and 196 megapixels
ENVIRONMENT: Final = {"VLLM_CPU_KVCACHE_SPACE": "1"}
PAUSE: Final = 0.01  # seconds between two looks


def sent(url: str, side: int) -> tuple[int, int, str]:
    """The bytes of a picture, and the status and error of its chat."""
    Image.new("L", (side, side), 128).save(written := io.BytesIO(), "PNG")
    data = written.getvalue()
    content = [picture_part("image/png", data), {"type": "text", "text": "What is this?"}]
    body = {"model": "demo", "messages": [{"role": "user", "content": content}], "max_tokens": 1}
    response = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=600)
    error = response.json()["error"]["message"] if response.is_error else ""
    return len(data), response.status_code, error


@contextmanager
def watched() -> Iterator[dict[str, float]]:
    """The largest growth of all processes below this one together, in GB, which is there at the end."""
    found, ended = {"gb": 0.0}, threading.Event()
    begin = _resident()

    def watch() -> None:
        while not ended.is_set():
            found["gb"] = max(found["gb"], (_resident() - begin) / 1e9)
            time.sleep(PAUSE)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield found
    finally:
        ended.set()
        thread.join()


def _resident() -> int:
    total = 0
    for process in psutil.Process().children(recursive=True):
        try:
            total += process.memory_info().rss
        except psutil.NoSuchProcess:
            continue
    return total


def measure(side: int, at_once: int, folder: Path) -> dict[str, Any]:
    with serving([], folder / "log", ENVIRONMENT) as url:
        sent(url, 48)  # what the first picture loads
        with watched() as growth, ThreadPoolExecutor(at_once) as pool:
            answers = list(pool.map(lambda _: sent(url, side), range(at_once)))
    size, _, error = answers[0]
    return {
        "pixels": side * side,
        "bytes": size,
        "at once": at_once,
        "status": sorted({each[1] for each in answers}),
        "error": error,
        "growth_gb": round(growth["gb"], 2),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=RESULTS)
    args = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for side in SIDES:
            for at_once in (1, 4):
                rows.append(measure(side, at_once, Path(folder)))
                print(rows[-1], flush=True)
    args.output.write_text(json.dumps({"machine": describe_machine(), "rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
