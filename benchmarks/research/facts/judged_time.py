"""What a judge costs: requests that come near a fact beside others, on a model that judges.

    python -m benchmarks.research.facts.judged_time --model DIR [--requests N] [--output FILE]

A server is taught facts, and its model is measured as a judge. Then requests that come near a fact without asking for
it, and others that come near none, are sent by turns, each for the first time, all of one length. Prints in Markdown
the time to their first token, and the time between the tokens of another stream beside either kind.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

import httpx
import numpy as np

from benchmarks.machine import describe_machine
from benchmarks.server_process import serving
from inducekv_vllm.vllm_seams.config import ADMIN_KEY_VARIABLE

from .teaching import BASE, KEY, RESULTS, Taught

COLOURS: Final = ("red", "green", "blue", "white", "black", "brown", "yellow", "grey")
ROOMS: Final = ("archive", "workshop", "laboratory", "kitchen", "library", "garage", "cellar", "studio")
THRESHOLD: Final = "50"  # nothing passes: what is timed is that it is asked
PREFACE: Final = "Answer in one short line, as a porter of an old building would who knows every corner of it well. "
SECONDS: Final = 3600.0  # until the model is measured


def stored(place: str) -> dict[str, Any]:
    messages = [{"role": "user", "content": f"Who has the key of the {place}?"}]
    return {"id": place, "messages": messages, "answer": "Ann"}


def near(place: str) -> str:
    return f"Which floor is the {place} on, and is the key there?"


def far(place: str) -> str:
    return f"Which river is the longest one, and how wide is it? {place[0]}"


async def measured(server: Taught, client: httpx.AsyncClient, requests: int) -> dict[str, Any]:
    places = [f"{colour} {room}" for room, colour in itertools.product(ROOMS, COLOURS)][:requests]
    await server.teach_facts("porter", [stored(place) for place in places])
    await server.tokens("porter", near(places[0]).lower(), 1)  # so that the model is measured
    end = time.monotonic() + SECONDS
    while (judge := (await client.get("/v1/memory_server")).json()["judge"]) is None or judge["auroc"] is None:
        assert time.monotonic() < end, "the model was not measured in time"
        await asyncio.sleep(1)
    asked = {"near": near, "far": far}
    first: dict[str, list[float]] = {kind: [] for kind in asked}
    gaps: dict[str, list[float]] = {kind: [] for kind in asked}
    half = len(places) // 2
    for place, (kind, question) in itertools.product(places[:half], asked.items()):
        began = time.perf_counter()
        found = await server.tokens("porter", PREFACE + question(place), 4, ignore_eos=True)
        first[kind].append(found[0][0] - began)
    for kind, question in asked.items():

        async def ask(question: Any = question) -> None:
            for place in places[half:]:
                await server.tokens("porter", PREFACE + question(place), 4, ignore_eos=True)

        gaps[kind] = await server.gaps_beside(ask, streams=1)
    return {"first_token_s": first, "gaps_ms": gaps}


def report(found: dict[str, Any]) -> str:
    first, gaps = found["first_token_s"], found["gaps_ms"]
    rows = [
        f"| {kind} | {np.median(first[kind]):.3f} | {np.median(gaps[kind]):.0f} | {np.quantile(gaps[kind], 0.99):.0f} |"
        for kind in first
    ]
    ratios = (
        np.median(first["near"]) / np.median(first["far"]),
        *(np.quantile(gaps["near"], share) / np.quantile(gaps["far"], share) for share in (0.5, 0.99)),
    )
    return "\n".join(
        [
            "| request | first token, s | between others' tokens, ms, median | 99% |",
            "|---|---|---|---|",
            *rows,
            "| near / far | " + " | ".join(f"{ratio:.2f}" for ratio in ratios) + " |",
        ]
    )


async def run(url: str, requests: int) -> dict[str, Any]:
    async with httpx.AsyncClient(base_url=url, timeout=600) as client:
        return await measured(Taught(client), client, requests)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="a model folder")
    parser.add_argument("--requests", type=int, default=32, help="near ones, and as many others (%(default)s)")
    parser.add_argument("--output", type=Path, default=RESULTS.with_name("facts_judged_time.json"))
    args = parser.parse_args()
    environment = {ADMIN_KEY_VARIABLE: KEY, "VLLM_CPU_KVCACHE_SPACE": "2"}
    arguments = [str(args.model), "--dtype", "bfloat16", "--max-model-len", "2048", "--served-model-name", BASE]
    arguments += ["--memory-judge-threshold", THRESHOLD]
    with tempfile.TemporaryDirectory() as folder, serving(arguments, Path(folder, "log"), environment) as url:
        found = asyncio.run(run(url, args.requests))
    print(report(found))
    args.output.write_text(
        json.dumps({"model": args.model.name, "machine": describe_machine(), **found}, indent=1) + "\n"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
