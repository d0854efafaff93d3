"""One fleet of bundles on two servers behind vLLM's router: `python -m benchmarks.fleet.router --router vllm-router`.

The servers share a folder, where each finds a bundle by name when it is asked for it, and nothing else. The router
sends requests of one name to one server. In turn, under Zipf traffic: names are published again and new ones for the
first time; then one server is killed with SIGKILL. Each answer is compared with the fact that its bundle has by then.
It says how many names both servers have looked up and how many streams the kill has broken off, and fails if an answer
is wrong or a request has failed.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx

from benchmarks.churn.changes import meanwhile
from benchmarks.record import keep, parser_of
from benchmarks.server_process import processes_of, reserved_port, starting
from inducekv_vllm.backbone.fact_reader import FactReader
from inducekv_vllm.bundle import write_bundle
from server.demo import CHECKPOINT

from .bundles import Member, made
from .run import ENVIRONMENT, LIMITS, SERVER, keep_publishing
from .traffic import Expected, Fleet, Reply, first_tokens

SERVERS = 2
START_S = 60.0  # of the router


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--router", required=True, metavar="COMMAND", help="vllm-router, or its path")
    parser.add_argument("--bundles", type=int, default=120)
    parser.add_argument("--requests", type=int, default=900, help="a third in each part")
    parser.add_argument("--concurrency", type=int, default=4)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        work, files = Path(folder), Path(folder, "bundles")
        files.mkdir()
        flags = [str(CHECKPOINT), "--memory-resolver", str(files), *SERVER]
        logs = [work / f"server-{number}.log" for number in range(SERVERS)]
        waits = [stack.enter_context(starting(flags, log, ENVIRONMENT)) for log in logs]
        urls = [wait() for wait in waits]
        router = stack.enter_context(routed(args.router, urls, work / "router.log"))
        measured = asyncio.run(measure(router, urls, files, args))
    keep({"benchmark": "fleet behind a router", "bundles": args.bundles, **measured}, args.output)
    return 0 if measured["passed"] else 1


@contextmanager
def routed(command: str, urls: list[str], log: Path) -> Iterator[str]:
    """The address of a router in front of these servers."""
    with reserved_port() as metrics:
        arguments = ["--worker-urls", *urls, "--policy", "consistent_hash"]
        arguments += ["--prometheus-port", str(metrics), "--prometheus-host", "127.0.0.1"]
        with starting(arguments, log, program=[command]) as wait_until_healthy:
            yield wait_until_healthy(START_S)


class Retrying(Fleet):
    """A stream whose server is killed breaks off: the router cannot begin it again, and whoever asked asks again."""

    async def ask(self, member: Member) -> Reply:
        try:
            return await super().ask(member)
        except httpx.TransportError:
            self.counts["broken off"] += 1
            return await super().ask(member)


async def measure(router: str, urls: list[str], files: Path, args: argparse.Namespace) -> dict[str, Any]:
    """All parts, one after the other."""
    expected, found, part = Expected(), dict[str, Any](), args.requests // 3
    async with httpx.AsyncClient(base_url=router, timeout=600, limits=LIMITS) as client:
        fleet = Retrying(client, [], expected)
        publish(fleet, files, range(args.bundles), seed=0)
        random.Random(1).shuffle(fleet.members)
        async with meanwhile(keep_publishing(fleet, files)):
            found["zipf"] = first_tokens(await fleet.zipf(part, args.concurrency, 1))
        found["names_by_server"], found["names_of_both"] = await names_of(urls)
        publish(fleet, files, range(args.bundles, args.bundles + 20), seed=1)
        found["new_names"] = first_tokens([await fleet.ask(member) for member in fleet.members[-20:]])
        traffic = asyncio.create_task(fleet.zipf(part, args.concurrency, 2))
        await asyncio.sleep(3)
        for process in processes_of(urls[0]):
            os.kill(process, signal.SIGKILL)
        found["one_server_killed"] = first_tokens(await traffic)
        found["one_server_left"] = first_tokens(await fleet.zipf(part, args.concurrency, 3))
        found["each_name_once"] = first_tokens(await fleet.scan(args.concurrency))
    counts, faults = dict(fleet.counts), fleet.faults
    return {"verdicts": counts, "faults": faults[:20], **found, "passed": not faults and counts["right"] > 0}


def publish(fleet: Fleet, files: Path, numbers: range, seed: int) -> None:
    """Bundles with facts for the first time, into the folder that all servers look in."""
    reader, rng = FactReader.of(CHECKPOINT), random.Random(seed)
    for number in (3 * each for each in numbers):  # every third has facts alone
        member, bundle = made(reader, number, rng)
        assert member.answer is not None
        write_bundle(bundle, member.file(files), verify=False)
        fleet.members.append(member)
        fleet.expected.publish(member.name, member.answer)


async def names_of(urls: list[str]) -> tuple[list[int], int]:
    """How many names each server has looked up, and how many both have."""
    known = []
    for url in urls:
        async with httpx.AsyncClient(base_url=url, timeout=60) as client:
            listed = (await client.get("/v1/memory_bundles", params={"limit": 1000})).json()
        known.append({each["name"] for each in listed["data"]})
    return [len(names) for names in known], len(set.intersection(*known))


if __name__ == "__main__":
    sys.exit(main())
