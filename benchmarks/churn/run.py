"""Are all answers right while bundles change, is nothing left behind, and what do the changes cost other requests?

    python -m benchmarks.churn.run                    # 10,000 requests, 32 at a time; half an hour on two cores
    python -m benchmarks.churn.run --requests 300     # the same, shorter

Four names: one is replaced every second, one is unloaded and loaded again with other contents, two stay. Every answer
is compared, token by token, with what the same content answers alone. Then the time between tokens of one of those that
stay, while a large bundle is swapped again and again and while none is. The command fails if an answer is wrong, if a
request fails that should not, if something is left in the server, or if swaps cost more than `MOST_P99`. The server's
cache of oneDNN primitives is small: with its usual size it alone grows by more than what is allowed here.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import secrets
import sys
import tempfile
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx

from benchmarks.machine import describe_machine
from benchmarks.server_process import serving
from benchmarks.serving.run import write_exemplars
from inducekv_vllm.config import ADMIN_KEY_VARIABLE
from server.demo import CHECKPOINT

from . import gaps
from .changes import Admin, meanwhile
from .contents import BASE, Contents, ask_alone, make_contents, make_questions
from .crowd import Crowd, Verdicts
from .leaks import Held, InUse, drained, follow, held_at_rest, in_use_at_rest

RESULTS = Path(__file__).parents[1] / "results"
QUESTIONS = 12
NAMES = KEPT, KEPT_TOO, REPLACED, RELOADED = "kept", "kept-too", "replaced", "reloaded"
LARGE_ONE = "large"
# Few blocks: requests are preempted.
SERVER = ["--dtype", "float32", "--max-model-len", "512", "--max-num-seqs", "16", "--enforce-eager"]
SERVER += ["--block-size", "32", "--num-gpu-blocks-override", "24", "--served-model-name", BASE]
# oneDNN keeps the kernels of the last 1024 shapes, about 0.6 MiB each.
FEW_PRIMITIVES = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "128"}
ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_SERVER_DEV_MODE": "1", **FEW_PRIMITIVES}
SMALL_ENTRIES = 1024  # more than all bundles but the large ones have, all versions counted
PREEMPTIONS = "vllm:num_preemptions_total{"
TURN_S = 10.0
COURSE_EVERY_S = 60.0
MOST_P99 = 1.2  # time between tokens with swaps, relative to that without
MIB_THAT_MAY_GROW = 64.0  # allocators keep some of what they have freed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--turns", type=int, default=10, help="turns of 10 s for the time between tokens, of each kind")
    parser.add_argument("--swapped-entries", type=int, default=1024, help="of the bundle that is swapped meanwhile")
    parser.add_argument("--output", type=Path, help="write the result to this JSON file")
    args = parser.parse_args()
    if min(args.requests, args.concurrency, args.swapped_entries) < 1 or args.turns < 0:
        parser.error("--requests, --concurrency and --swapped-entries must be at least 1, --turns at least 0")
    result = run(args)
    print(json.dumps(result, indent=2))
    if args.output is not None:
        args.output.write_text(json.dumps(result, indent=2) + "\n")
    return 0 if result["passed"] else 1


def run(args: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        contents = make_contents(CHECKPOINT, write_exemplars(work, [64]), work, args.swapped_entries)
        key = secrets.token_hex()
        # As docs/operate.md says: with copies of the versions, and with a log.
        kept = ["--memory-state", str(work / "state"), "--memory-audit-log", str(work / "audit.jsonl")]
        flags = [
            str(CHECKPOINT),
            "--memory-root",
            str(work),
            "--memory-pool-entries",
            str(2 * args.swapped_entries + SMALL_ENTRIES),
            *kept,
            *SERVER,
        ]
        with serving(flags, work / "server.log", ENVIRONMENT | {ADMIN_KEY_VARIABLE: key}) as url:
            measured = asyncio.run(measure(url, key, contents, args))
    return {
        "benchmark": "churn",
        "command": " ".join(["python -m benchmarks.churn.run", *sys.argv[1:]]),
        "environment": ENVIRONMENT,
        **measured,
        "machine": describe_machine(),
    }


async def measure(url: str, key: str, contents: Contents, args: argparse.Namespace) -> dict[str, Any]:
    """Ask every content alone, then the crowd under changes, then for the time between tokens."""
    # A connection for each request: the server closes idle ones.
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as client:
        admin, questions = Admin(client, key, contents.paths), make_questions(QUESTIONS)
        references = await ask_alone(client, questions, {BASE: BASE})
        empty = await InUse.on(client)
        for number, content in enumerate(contents.asked):
            await admin.load(f"alone-{number}", content)
            references |= await ask_alone(client, questions, {f"alone-{number}": content})
            await admin.unload(f"alone-{number}")
        first = *contents.kept, contents.replaced[0], contents.reloaded[0]
        for name, content in zip(NAMES, first, strict=True):
            await admin.load(name, content)
        crowd = Crowd(client, questions, (BASE, *NAMES), admin.names, references, Verdicts())
        await crowd.ask(min(args.requests, 500), args.concurrency, seed=1)  # what grows once has grown
        await drained(client, key)
        before = Held.by(url)
        course: list[float] = []
        replacing = admin.keep_replacing(REPLACED, contents.replaced[::-1], 1.0)
        reloading = admin.keep_reloading(RELOADED, contents.reloaded[::-1], 2.0)
        async with meanwhile(replacing, reloading, follow(url, course, COURSE_EVERY_S)):
            await crowd.ask(args.requests, args.concurrency, seed=2)
        await drained(client, key)
        after = await held_at_rest(url, before.open_files)
        await admin.load(LARGE_ONE, contents.large[1])
        times = {}
        if args.turns:
            times = await gaps.measure(client, admin, questions, KEPT, LARGE_ONE, contents.large, args.turns, TURN_S)
        for name in (*NAMES, LARGE_ONE):
            with suppress(AssertionError):  # the last change may have left none
                await admin.unload(name)
        await drained(client, key)
        in_use = await in_use_at_rest(client, empty)
        metrics = (await client.get("/metrics")).text
    preempted = sum(float(line.split()[1]) for line in metrics.splitlines() if line.startswith(PREEMPTIONS))
    verdicts = crowd.verdicts
    grown = after.resident_mib - before.resident_mib
    return {
        "requests": args.requests,
        "concurrency": args.concurrency,
        "verdicts": dict(verdicts.counts),
        "faults": verdicts.faults[:20],
        "changes": len(admin.seconds),
        "preemptions": preempted,
        "resident_mib": {"before": before.resident_mib, "after": after.resident_mib, "course": course},
        "open_files": {"before": before.open_files, "after": after.open_files, "more": after.files - before.files},
        "in_use": {"before": asdict(empty), "after": asdict(in_use)},
        "swapped_entries": args.swapped_entries,
        "swapped_mb": round(contents.paths[contents.large[0]].stat().st_size / 1e6, 1),
        "ms_between_tokens": times,
        "passed": not verdicts.faults
        and verdicts.counts["right"] > 0
        and preempted > 0
        and grown < MIB_THAT_MAY_GROW
        and after.open_files <= before.open_files
        and in_use == empty
        and (not times or times["p99"]["ratio"] <= MOST_P99),
    }


if __name__ == "__main__":
    sys.exit(main())
