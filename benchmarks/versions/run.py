"""How long does a version take to load that shares nine tenths of its entries with the one before?

    python -m benchmarks.versions.run                   # 4096 entries, 10 loads of each kind
    python -m benchmarks.versions.run --entries 256 --rounds 2
    python -m benchmarks.versions.run --entries 1024 --payload-tokens 40

A name of the demo model's server is replaced again and again: by a bundle that shares no entry with what is loaded, and
by one of which every tenth entry is new. The seconds are those of the route, as a client sees them, on a server without
a state folder and on one with. Then the parts of both loads are timed in this process.

Without a state folder, the second is to take at most a quarter of the first's time (medians); otherwise the exit status
is 1.
"""

from __future__ import annotations

import argparse
import json
import secrets
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

import httpx

from benchmarks.machine import describe_machine
from benchmarks.server_process import serving
from inducekv_vllm.attention.pool import ENTRY_TOKENS
from inducekv_vllm.config import ADMIN_HEADER, ADMIN_KEY_VARIABLE
from server.demo import CHECKPOINT

from .contents import PAYLOAD_TOKENS, Content, make_contents
from .parts import measure_parts

NAME = "replaced"
TARGET = 0.25  # of the medians' ratio, without a state folder
SERVER = ["--dtype", "float32", "--max-model-len", "512", "--max-num-seqs", "2", "--enforce-eager"]
DRAIN_SECONDS = 60.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--entries", type=int, default=4096)
    parser.add_argument("--payload-tokens", type=int, default=PAYLOAD_TOKENS, help="of an entry (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="each has two loads of either kind")
    parser.add_argument("--output", type=Path, help="write the result to this JSON file")
    args = parser.parse_args()
    if args.entries < 10 or args.rounds < 1 or args.payload_tokens < 1:
        parser.error("--entries must be at least 10, --rounds and --payload-tokens at least 1")
    result = run(args.entries, args.payload_tokens, args.rounds)
    print(json.dumps(result, indent=2))
    if args.output is not None:
        args.output.write_text(json.dumps(result, indent=2) + "\n")
    return 0 if result["reached"] else 1


def run(entries: int, payload_tokens: int, rounds: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        pairs = make_contents(CHECKPOINT, entries, work, payload_tokens)
        pool = -(-2 * entries * payload_tokens // ENTRY_TOKENS) + 64
        flags = [str(CHECKPOINT), "--memory-root", folder, "--memory-pool-entries", str(pool), *SERVER]
        key = secrets.token_hex()
        environment = {ADMIN_KEY_VARIABLE: key, "VLLM_CPU_KVCACHE_SPACE": "1"}
        loads = {}
        for mode, more in (("no_state_folder", []), ("state_folder", ["--memory-state", str(work / "state")])):
            with serving([*flags, *more], work / "server.log", environment) as url:
                loads[mode] = measure(url, key, pairs, rounds)
                print(f"{mode}: {loads[mode]}", file=sys.stderr)
        parts = measure_parts(pairs[0], pool, rounds)
        megabytes = pairs[0][0].path.stat().st_size / 1e6
    return {
        "benchmark": "versions",
        "command": " ".join(["python -m benchmarks.versions.run", *sys.argv[1:]]),
        "entries": entries,
        "payload_tokens": payload_tokens,
        "shared_entries": pairs[0][1].shared,
        "file_mb": round(megabytes, 1),
        "target_ratio": TARGET,  # without a state folder; with one, the file is read whole
        "reached": is_reached(loads),
        "loads": loads,
        "parts_ms": parts,
        "machine": describe_machine(),
    }


def is_reached(loads: Mapping[str, Any]) -> bool:
    return bool(loads["no_state_folder"]["ratio"] <= TARGET)


def measure(url: str, key: str, pairs: list[tuple[Content, Content]], rounds: int) -> dict[str, Any]:
    """Seconds of every load, their medians, and the medians' ratio."""
    seconds: dict[str, list[float]] = {"full": [], "shared": []}
    with httpx.Client(base_url=url, headers={ADMIN_HEADER: key}, timeout=600) as client:
        for _ in range(rounds):
            for pair in pairs:
                for kind, content in zip(seconds, pair, strict=True):
                    seconds[kind].append(_load(client, content))
    full, shared = (median(values) for values in seconds.values())
    rounded = {kind: [round(value, 3) for value in values] for kind, values in seconds.items()}
    return {
        "full_s": round(full, 3),
        "shared_s": round(shared, 3),
        "ratio": round(shared / full, 3),
        "seconds": rounded,
    }


def _load(client: httpx.Client, content: Content) -> float:
    """Seconds until the name stands for this content; then wait until the version before has left."""
    request = {"name": NAME, "path": str(content.path), "replace": True}
    began = time.perf_counter()
    response = client.post("/v1/load_memory_bundle", json=request)
    seconds = time.perf_counter() - began
    assert response.status_code == 200, response.text
    assert response.json()["shared_entries"] == content.shared, response.text[:200]
    deadline = time.monotonic() + DRAIN_SECONDS
    while client.get("/v1/memory_bundles").json()["draining"]:
        assert time.monotonic() < deadline, "the version before does not leave"
        time.sleep(0.1)
    time.sleep(0.2)  # it is erased after it has left
    return seconds


if __name__ == "__main__":
    sys.exit(main())
