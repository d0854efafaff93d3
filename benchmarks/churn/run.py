"""A soak test: are all answers right while bundles change, and is nothing left behind?

    python -m benchmarks.churn.run [--requests N]      # 10,000, 32 at a time, take half an hour on two cores

Four names: one is replaced every second, one is unloaded and loaded again with other contents, two stay. Every answer
is compared, token by token, with what the same content answers alone. The command fails if an answer is wrong, if a
request fails that should not, or if something is left in the server. The server's cache of oneDNN primitives is small:
with its usual size it alone grows by more than what is allowed here.
"""

from __future__ import annotations

import asyncio
import secrets
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx

from benchmarks.chat import question_of, user_turn
from benchmarks.demo.world import examples
from benchmarks.record import keep, parser_of
from benchmarks.server_process import serving
from inducekv_vllm.vllm_seams.config import ADMIN_KEY_VARIABLE
from selector.client import ServerError
from server.demo import CHECKPOINT

from .changes import Admin, Content, meanwhile
from .crowd import BASE, Crowd, Verdicts, ask_alone, make_contents
from .leaks import Held, drained, held_at_rest, in_use, in_use_at_rest

QUESTIONS = 12
NAMES = _, _, REPLACED, RELOADED = "kept", "kept-too", "replaced", "reloaded"
# Few blocks: requests are preempted.
SERVER = ["--dtype", "float32", "--max-model-len", "512", "--max-num-seqs", "16", "--enforce-eager"]
SERVER += ["--block-size", "32", "--num-gpu-blocks-override", "24", "--served-model-name", BASE]
# oneDNN keeps the kernels of the last 1024 shapes, about half a MiB each.
FEW_PRIMITIVES = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "128"}
ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_SERVER_DEV_MODE": "1", **FEW_PRIMITIVES}
PREEMPTIONS = "vllm:num_preemptions_total{"
MIB_THAT_MAY_GROW = 64.0  # allocators keep some of what they have freed


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--concurrency", type=int, default=32)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        work, key = Path(folder), secrets.token_hex()
        paths = make_contents(CHECKPOINT, work)
        kept = ["--memory-state", str(work / "state"), "--memory-audit-answers"]
        flags = [str(CHECKPOINT), "--memory-root", folder, "--memory-pool-entries", "1024", *kept, *SERVER]
        with serving(flags, work / "server.log", ENVIRONMENT | {ADMIN_KEY_VARIABLE: key}) as url:
            measured = asyncio.run(measure(url, key, paths, args.requests, args.concurrency))
    keep({"benchmark": "churn", **measured}, args.output)
    return 0 if measured["passed"] else 1


async def measure(url: str, key: str, paths: Mapping[Content, Path], requests: int, concurrency: int) -> dict[str, Any]:
    """Ask every content alone, then the crowd under changes; then look for what is left."""
    # A connection for each request: the server closes idle ones.
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as client:
        admin, asked = Admin(client, key, paths), examples("guild", "test", QUESTIONS)
        questions = [[user_turn(pixels, question_of(record))] for record, pixels in asked]
        references = await ask_alone(client, questions, {BASE: BASE})
        empty = await in_use(client)
        for content in paths:
            await admin.load("alone", content)
            references |= await ask_alone(client, questions, {"alone": content})
        await admin.unload("alone")
        merged, decoupled, first, later, *others = paths
        for name, content in zip(NAMES, (merged, decoupled, first, others[0]), strict=True):
            await admin.load(name, content)
        crowd = Crowd(client, questions, (BASE, *NAMES), admin.names, references, Verdicts())
        await crowd.ask(min(requests, 500), concurrency, seed=1)  # what grows once has grown
        await drained(client, key)
        before = await held_at_rest(url)
        replacing = admin.keep_replacing(REPLACED, [later, first], 1.0)
        reloading = admin.keep_replacing(RELOADED, others[::-1], 2.0, unload=True)
        async with meanwhile(replacing, reloading):
            await crowd.ask(requests, concurrency, seed=2)
        await drained(client, key)
        after = await held_at_rest(url, before)
        for name in NAMES:
            with suppress(ServerError):  # the last change may have left none
                await admin.unload(name)
        await drained(client, key)
        left = await in_use_at_rest(client, empty)
        metrics = (await client.get("/metrics")).text
    preempted = sum(float(line.split()[1]) for line in metrics.splitlines() if line.startswith(PREEMPTIONS))
    verdicts, grown = crowd.verdicts, after.resident_mib - before.resident_mib
    right = not verdicts.faults and verdicts.counts["right"] > 0 and preempted > 0
    nothing_left = left == empty and not after.more_than(before) and grown < MIB_THAT_MAY_GROW
    return {
        "requests": requests,
        "concurrency": concurrency,
        "verdicts": dict(verdicts.counts),
        "faults": verdicts.faults[:20],
        "changes": admin.loads,
        "preemptions": preempted,
        "held": {"before": _counts(before), "after": _counts(after), "left_open": dict(after.more_than(before))},
        "in_use": {"before": empty, "after": left},
        "passed": right and nothing_left,
    }


def _counts(held: Held) -> dict[str, float]:
    return {"resident_mib": held.resident_mib, "open_files": held.open_files.total()}


if __name__ == "__main__":
    sys.exit(main())
