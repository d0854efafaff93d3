"""A warm name of a fleet against the only bundle of a server: `python -m benchmarks.fleet.alone`.

Two servers of the demo model are asked by turns for the same bundle. One has it alone; the other finds it among all of
a folder, with room for a share of them. `quiet`: nothing else is asked. `busy`: each server also gets so many requests
a second; those to the fleet go to one cold name after the other, which it loads, those to the other server to its
bundle. So what differs is the loads. Ratios are medians over the rounds, of the fleet's numbers and those of the other
server in the same round: the median time to the first token, output tokens a second, and the 99th percentile of the
times between tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from benchmarks.churn.changes import meanwhile
from benchmarks.record import keep, parser_of
from benchmarks.server_process import starting
from server.demo import CHECKPOINT

from .bundles import PLAIN, Member, make_fleet
from .run import ENVIRONMENT, LIMITS, SERVER

TOKENS = 48  # of an answer that is timed
PROBES = 8  # answers in a round, for each server and kind of round
SPIN_S = 1.5  # vLLM's processes spin for a second after their last step: those of the other server are to be still


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--bundles", type=int, default=300)
    parser.add_argument("--share", type=float, default=0.2, help="of the bundles' entries that the pool has room for")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--rate", type=float, default=4.0, help="requests a second beside, in busy rounds")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        work, files = Path(folder), Path(folder, "bundles")
        files.mkdir()
        members = make_fleet(CHECKPOINT, files, args.bundles)
        probed = next(member for member in members if member.kind == "task")
        entries = sum(member.num_entries for member in members)
        room = str(max(512, round(args.share * entries)))
        flags = {
            "alone": ["--memory", f"{probed.name}={probed.file(files)}"],
            "fleet": ["--memory-resolver", str(files)],
        }
        waits = [
            stack.enter_context(
                starting(
                    [str(CHECKPOINT), *own, *SERVER, "--memory-pool-entries", room], work / f"{name}.log", ENVIRONMENT
                )
            )
            for name, own in flags.items()
        ]
        urls = dict(zip(flags, (wait() for wait in waits), strict=True))
        goes_first = reads_at_once()
        rounds = asyncio.run(measure(urls, probed, members, args))
    known = {"benchmark": "a warm name of a fleet", "bundles": args.bundles, "pool_entries": int(room)}
    known |= {"rate": args.rate, "rounds": args.rounds, "client_goes_first": goes_first}
    keep({**known, **summary(rounds)}, args.output)
    return 0


def reads_at_once() -> bool:
    """Let the client go before the servers, whose processes are as many as the cores: it is to see when a token comes.

    Returns:
        Whether the system let it: Linux, with the right to schedule.
    """
    try:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    except (AttributeError, PermissionError):
        return False
    return True


async def measure(
    urls: dict[str, str], probed: Member, members: list[Member], args: argparse.Namespace
) -> list[dict[str, dict[str, dict[str, float]]]]:
    """Rounds by kind and server."""
    cold = itertools.cycle([member.name for member in members if member is not probed])
    beside: dict[str, Iterator[str]] = {"alone": itertools.repeat(probed.name), "fleet": cold}
    rounds = []
    async with AsyncExitStack() as stack:
        clients = {
            name: await stack.enter_async_context(httpx.AsyncClient(base_url=url, timeout=600, limits=LIMITS))
            for name, url in urls.items()
        }
        for client in clients.values():  # warm
            await timed(client, probed)
        for number in range(args.rounds):
            order = list(clients) if number % 2 else list(reversed(clients))
            found: dict[str, dict[str, dict[str, float]]] = {"quiet": {}, "busy": {}}
            for kind, name in itertools.product(found, order):
                await asyncio.sleep(SPIN_S)
                traffic = [asking(clients[name], beside[name], args.rate)] if kind == "busy" else []
                async with meanwhile(*traffic):
                    found[kind][name] = await probes(clients[name], probed)
            rounds.append(found)
    return rounds


async def asking(client: httpx.AsyncClient, names: Iterator[str], rate: float) -> None:
    """So many requests a second for one token, whether the earlier ones are answered or not, until cancelled."""
    async with asyncio.TaskGroup() as group:
        for name in names:
            body = {"model": name, "messages": [{"role": "user", "content": PLAIN}], "max_tokens": 1}
            group.create_task(posted(client, body))
            await asyncio.sleep(1 / rate)


async def posted(client: httpx.AsyncClient, body: dict[str, Any]) -> None:
    (await client.post("/v1/chat/completions", json=body)).raise_for_status()


async def probes(client: httpx.AsyncClient, probed: Member) -> dict[str, float]:
    """Of several answers, one after the other."""
    firsts, gaps, began = list[float](), list[float](), time.perf_counter()
    for _ in range(PROBES):
        first, between = await timed(client, probed)
        firsts.append(first)
        gaps += between
    return {
        "first_ms": 1e3 * statistics.median(firsts),
        "between_p99_ms": 1e3 * float(np.percentile(gaps, 99)),
        "tokens_per_s": PROBES * TOKENS / (time.perf_counter() - began),
    }


async def timed(client: httpx.AsyncClient, probed: Member) -> tuple[float, list[float]]:
    """Seconds to the first token, and between tokens."""
    body = {"model": probed.name, "messages": probed.question, "max_tokens": TOKENS, "temperature": 0}
    times = [time.perf_counter()]
    async with client.stream(
        "POST", "/v1/chat/completions", json={**body, "stream": True, "ignore_eos": True}
    ) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if line.startswith("data: {") and json.loads(line[6:])["choices"]:
                times.append(time.perf_counter())
    return times[1] - times[0], [after - before for before, after in itertools.pairwise(times[1:])]


def summary(rounds: list[dict[str, dict[str, dict[str, float]]]]) -> dict[str, Any]:
    """Medians of each server's numbers and of their ratios, by kind of round."""

    def median(of: Callable[[dict[str, dict[str, dict[str, float]]]], float]) -> float:
        return round(statistics.median(map(of, rounds)), 4)

    found: dict[str, Any] = {}
    for kind in ("quiet", "busy"):
        for number in ("first_ms", "between_p99_ms", "tokens_per_s"):
            row = {name: median(lambda each: each[kind][name][number]) for name in ("alone", "fleet")}  # noqa: B023
            row["ratio"] = median(lambda each: each[kind]["fleet"][number] / each[kind]["alone"][number])  # noqa: B023
            found.setdefault(kind, {})[number] = row
    return found


if __name__ == "__main__":
    sys.exit(main())
