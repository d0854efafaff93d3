"""A server that knows 100,000 names: how long its start takes, its memory, and what it lists.

    python -m benchmarks.fleet.names [--names N]

The names are written into a state file, as loads do it; then a server starts with it, and one with none. The difference
of their starts and of their memory is what the names cost.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import psutil

from benchmarks.record import keep, parser_of
from benchmarks.server_process import processes_of, serving
from inducekv_vllm.backbone.fact_reader import FactReader
from inducekv_vllm.bundle import write_bundle
from inducekv_vllm.frontend.served_bundle import ServedBundle
from inducekv_vllm.teaching import fact_of, taught
from server.demo import CHECKPOINT
from server.state import ServerState, VersionRecord

from .run import ENVIRONMENT, SERVER


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--names", type=int, default=100_000)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        state = Path(folder, "state")
        written_s = fill(state, Path(folder), args.names)
        runs = {}
        for what, flags in {"without": [], "with": ["--memory-state", str(state)]}.items():
            with serving([str(CHECKPOINT), *flags, *SERVER], Path(folder, what), ENVIRONMENT) as url:
                runs[what] = measure(url, args.names if flags else 0)
        open_s = opened(state)
        size = os.path.getsize(state)
    grown = runs["with"]["api_server_bytes"] - runs["without"]["api_server_bytes"]
    result = {"names": args.names, "state_bytes": size, "write_s": round(written_s, 1), "begin_s": round(open_s, 3)}
    result |= {"bytes_a_name": round(grown / args.names, 1), **runs}
    keep({"benchmark": "fleet_names", **result}, args.output)
    return 0


def fill(path: Path, folder: Path, count: int) -> float:
    """Record so many names of bundles with one fact each, which all have one file; return the seconds that it took."""
    reader = FactReader.of(CHECKPOINT)
    bundle = taught(None, [fact_of("What is the code of Lima?", "LIM")], reader).bundle
    file = folder / "lima.safetensors"
    write_bundle(bundle, file)
    state, began = ServerState(path, keeps_bundles=True), time.monotonic()
    state._durable.execute("PRAGMA synchronous = OFF")
    for number in range(count):
        digest = bundle.digest if number == 0 else f"{number:064x}"
        memory = ServedBundle(bundle.metadata.model_copy(update={"digest": digest}), str(file), 1)
        record = VersionRecord(f"tenant-{number:06d}", digest, None, datetime.now(UTC), "admin", str(file))
        state.point(record, memory, None, None, 3, "load")
    state.close()
    return time.monotonic() - began


def opened(path: Path) -> float:
    """Seconds in which a server takes over a state file."""
    began = time.monotonic()
    state = ServerState(path, keeps_bundles=True)
    state.begin({})
    assert state.snapshot().resident == {}
    state.close()
    return time.monotonic() - began


def measure(url: str, names: int) -> dict[str, Any]:
    """Memory of the API process, seconds of some requests, and bytes of what is listed."""
    server = psutil.Process(processes_of(url)[0])
    memory = server.memory_full_info().uss
    found: dict[str, Any] = {"api_server_bytes": memory}
    with httpx.Client(base_url=url, timeout=600) as client:
        for route in ("v1/models", "v1/memory_bundles", "metrics"):
            began = time.perf_counter()
            answer = client.get(f"/{route}")
            seconds = round(time.perf_counter() - began, 3)
            found[route] = {"bytes": len(answer.content), "s": seconds}
        if names:
            body = {"model": "tenant-000000", "messages": [{"role": "user", "content": "What is the code of Lima?"}]}
            answer = client.post("/v1/chat/completions", json={**body, "max_tokens": 4})
            found["answer"] = answer.json()["choices"][0]["message"]["content"]
    return found


if __name__ == "__main__":
    sys.exit(main())
