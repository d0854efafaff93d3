"""A fleet of bundles on one server: are all answers right, what does a cold name cost, and does a scan harm the busy?

    python -m benchmarks.fleet.run                                         # 1,000 bundles, 4,000 requests
    python -m benchmarks.fleet.run --bundles 10000 --requests 10000        # an hour

The pool has room for some of the bundles, host memory for more; a folder has them all, and the server finds them by
name. In turn: Zipf traffic while bundles are published again; single requests to warm and to cold names; a scan over
all names, then a storm of names that nobody has, both beside Zipf traffic. Each answer is compared with the bundle's
own: its fact, or what the bundle answers on a server that does nothing else. The command fails if one is wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx

from benchmarks.churn.changes import meanwhile
from benchmarks.record import keep, parser_of
from benchmarks.server_process import serving
from inducekv_vllm.backbone.fact_reader import FactReader
from inducekv_vllm.bundle import write_bundle
from server.demo import CHECKPOINT

from .bundles import Member, made, make_fleet
from .traffic import Expected, Fleet, Reply, crowd, first_tokens, request

SERVER = ["--dtype", "float32", "--max-model-len", "256", "--max-num-seqs", "16", "--enforce-eager"]
SERVER += ["--block-size", "32", "--no-enable-prefix-caching", "--served-model-name", "base"]
ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_SERVER_DEV_MODE": "1"}
LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=0)  # the server closes idle connections
PROBES = 60  # warm and cold names each, that are asked one by one
AT_ONCE = 4  # names that are asked for on the server that has no traffic
CHANGE_S = 1.0  # how often a bundle is published again


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--bundles", type=int, default=1000)
    parser.add_argument("--requests", type=int, default=4000, help="a quarter in each of the parts with Zipf traffic")
    parser.add_argument("--room", type=int, default=200, help="bundles of middling size that the pool has room for")
    parser.add_argument("--host", type=int, default=2000, help="bundles that the worker's host memory has room for")
    parser.add_argument("--concurrency", type=int, default=4)
    parser.add_argument("--strangers", type=int, default=2000)
    parser.add_argument("--serve-args", nargs=argparse.REMAINDER, default=[], help="more flags of the server")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        work, files = Path(folder), Path(folder, "bundles")
        files.mkdir()
        members = make_fleet(CHECKPOINT, files, args.bundles)
        entries = sum(member.num_entries for member in members)
        nbytes = sum(file.stat().st_size for file in files.iterdir())
        flags = [str(CHECKPOINT), "--memory-resolver", str(files), *SERVER]
        expected = Expected()
        with serving([*flags, "--memory-pool-entries", "4096"], work / "alone.log", ENVIRONMENT) as url:
            asyncio.run(ask_alone(url, members, expected))
        room, host_bytes = max(512, entries * args.room // args.bundles), nbytes * args.host // args.bundles
        flags += ["--memory-pool-entries", str(room), "--memory-host-bytes", str(host_bytes), *args.serve_args]
        with serving(flags, work / "server.log", ENVIRONMENT) as url:
            measured = asyncio.run(measure(url, members, expected, files, args))
    fleet = {"bundles": args.bundles, "bytes": nbytes, "entries": entries, "pool_entries": room}
    keep({"benchmark": "fleet", **fleet, "host_bytes": host_bytes, **measured}, args.output)
    return 0 if measured["passed"] else 1


async def ask_alone(url: str, members: list[Member], expected: Expected) -> None:
    """What each member answers on a server that evicts and changes nothing else meanwhile."""
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=LIMITS) as client:

        async def ask(member: Member) -> Reply:
            reply = await request(client, member.name, member)
            assert reply.status == 200, reply.text
            expected.publish(member.name, reply.text)
            return reply

        await crowd(ask, (member for member in members if member.answer is None), AT_ONCE)
    for member in members:
        if member.answer is not None:
            expected.publish(member.name, member.answer)


async def measure(
    url: str, members: list[Member], expected: Expected, files: Path, args: argparse.Namespace
) -> dict[str, Any]:
    """All parts, one after the other."""
    random.Random(1).shuffle(members)
    part = args.requests // 4
    found: dict[str, Any] = {}
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=LIMITS) as client:
        fleet = Fleet(client, members, expected)

        async def zipf(seed: int) -> dict[str, Any]:
            began, replies = time.monotonic(), await fleet.zipf(part, args.concurrency, seed)
            rate = round(len(replies) / (time.monotonic() - began), 1)
            return {**first_tokens(replies), "requests_a_second": rate, "busy_names_resident": fleet.watched()}

        async with meanwhile(fleet.watch()):
            async with meanwhile(keep_publishing(fleet, files)):
                found["zipf"] = await zipf(1)
            found["one_by_one"] = await one_by_one(fleet)
            fleet.watched()
            zipfs, scan = await asyncio.gather(zipf(2), fleet.scan(1))
            found["scan"] = {"zipf_beside": zipfs, **first_tokens(scan)}
            found["after_the_scan"] = await zipf(3)
            zipfs, storm = await asyncio.gather(zipf(4), fleet.strangers(args.strangers, 32))
            found["strangers"] = {
                "zipf_beside": zipfs,
                "names": len(storm),
                "not_found": sum(r.status == 404 for r in storm),
            }
        found["listed"] = {
            route: {"bytes": len((await client.get(f"/{route}")).content)}
            for route in ("metrics", "v1/models", "v1/memory_bundles")
        }
        counters = ("inducekv:evictions_total", "inducekv:cold_seconds_count", "inducekv:resolver_looks_total")
        lines = (await client.get("/metrics")).text.splitlines()
        found["counters"] = dict(line.rsplit(" ", 1) for line in lines if line.startswith(counters))
    return {
        "verdicts": dict(fleet.counts),
        "faults": fleet.faults[:20],
        **found,
        "passed": not fleet.faults and fleet.counts["right"] > 0,
    }


async def one_by_one(fleet: Fleet) -> dict[str, Any]:
    """The first token of warm and of cold names, with nothing beside."""
    replies: dict[bool, list[Any]] = {True: [], False: []}
    names = random.Random(3).sample(fleet.members, len(fleet.members))
    for member in (*fleet.members[: 2 * PROBES], *names):
        is_warm = await fleet.is_resident(member.name)
        if len(replies[is_warm]) < PROBES:
            replies[is_warm].append(await fleet.ask(member))
    return {"warm": first_tokens(replies[True]), "cold": first_tokens(replies[False])}


async def keep_publishing(fleet: Fleet, files: Path) -> None:
    """Publish a bundle with facts again, every now and then, until cancelled."""
    reader, rng = await asyncio.to_thread(FactReader.of, CHECKPOINT), random.Random(5)
    busy = [place for place, member in enumerate(fleet.members[:100]) if member.kind == "facts"]
    while True:
        await asyncio.sleep(CHANGE_S)
        number = int(fleet.members[rng.choice(busy)].name.rpartition("-")[2])
        member, bundle = await asyncio.to_thread(made, reader, number, rng)
        assert member.answer is not None
        fleet.expected.publish(member.name, member.answer)
        await asyncio.to_thread(write_bundle, bundle, member.file(files), verify=False)


if __name__ == "__main__":
    sys.exit(main())
