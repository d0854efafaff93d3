"""What a load costs: milliseconds from disk and from the workers' host memory, and what running requests notice.

    python -m benchmarks.churn.loads --model "$(python -m benchmarks.real.model)"

Bundles of random content: 100 facts, and tasks of 1, 2 and 4 entries with maps behind a gate. Each is loaded and
unloaded on an engine as the server does it, while nothing runs and while requests are answered; medians and 99th
percentiles. Then the time between the tokens of these requests is compared with and without a load every 100 ms.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM

from benchmarks.record import keep, parser_of
from benchmarks.serving.bundles import TASK, fixed_gate, random_bundle
from inducekv_vllm.bundle import FactRecord, write_bundle
from inducekv_vllm.bundle.tensors import bundle_without_entries
from inducekv_vllm.frontend.loading import load_async
from inducekv_vllm.vllm_seams.config import SCHEDULER_CLS, WORKER_CLS
from selector.backbone.model import Backbone
from selector.refined.settings import RefinedSettings
from server.demo import CHECKPOINT

from .changes import meanwhile

FACTS: Final = 100
ENTRIES: Final = (1, 2, 4)
REQUESTS: Final = 4
TOKENS: Final = 200  # of an answer
PAUSE_S: Final = 0.1  # between loads while the time between tokens is measured
HOST_BYTES: Final = 2**28


@dataclass(frozen=True)
class Stored:
    """A bundle's file."""

    path: str
    digest: str
    size: int  # bytes


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--model", default=str(CHECKPOINT), help="a checkpoint's folder; default: the demo model")
    parser.add_argument("--rounds", type=int, default=40, help="loads of each bundle from each place")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        bundles = make_bundles(Backbone.load(args.model, dtype=torch.float32), Path(folder))
        measured = asyncio.run(measure(args.model, bundles, args.rounds))
    keep({"benchmark": "churn-loads", **measured}, args.output)
    return 0


def make_bundles(backbone: Backbone, folder: Path) -> dict[str, Stored]:
    """Facts alone, and a task of so many entries, by name."""
    torch.manual_seed(0)
    facts = tuple(
        FactRecord(
            id=str(number),
            task=TASK,
            question=f"When does shop number {number} at the old harbour open on weekdays?",
            answer=f"It opens at half past {number % 12}.",
            source_digest=str(number),
        )
        for number in range(FACTS)
    )
    made = {"facts": bundle_without_entries(backbone.fingerprint, recipe="facts", settings={}, facts=facts)}
    sizes, L, J = RefinedSettings(), backbone.num_layers, backbone.num_kv_heads
    width = backbone.num_heads // J * backbone.head_dim
    for entries in ENTRIES:
        made[f"task_{entries}"] = random_bundle(
            backbone,
            entries,
            sizes.payload_tokens,
            map_in=torch.randn(L, entries, J, sizes.map_rank, width) / width**0.5,
            map_out=1e-3 * torch.randn(L, entries, J, width, sizes.map_rank),
            form="decoupled",
            activations={TASK: "generation"},
            gate=fixed_gate(backbone, is_open=True),
        )
    found = {}
    for name, bundle in made.items():
        write_bundle(bundle, path := folder / f"{name}.safetensors")
        found[name] = Stored(str(path), bundle.digest, path.stat().st_size)
    return found


async def measure(model: str, bundles: dict[str, Stored], rounds: int) -> dict[str, Any]:
    """All figures, on one engine."""
    llm = AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            model,
            dtype="float32",
            max_model_len=512,
            max_num_seqs=2 * REQUESTS,
            enforce_eager=True,
            worker_cls=WORKER_CLS,
            scheduler_cls=SCHEDULER_CLS,
            additional_config={"inducekv": {"memory_host_bytes": HOST_BYTES}},
        )
    )
    crowd = Crowd(llm)
    try:
        idle = await loads_ms(llm, bundles, rounds)
        async with meanwhile(*crowd.asking()):
            await crowd.settled()
            busy = await loads_ms(llm, bundles, rounds)
        gaps = await gaps_ms(llm, bundles, crowd)
    finally:
        llm.shutdown()
    return {
        "model": Path(model).name,
        "bytes": {name: each.size for name, each in bundles.items()},
        "load_ms": {"idle": idle, "busy": busy},
        "between_tokens_ms": gaps,
    }


async def loads_ms(llm: AsyncLLM, bundles: dict[str, Stored], rounds: int) -> dict[str, Any]:
    """Of each bundle from disk and from host memory; the first load of an engine is not counted."""
    found: dict[str, dict[str, list[float]]] = {name: {"disk": [], "host": []} for name in bundles}
    for number in range(rounds + 1):
        for name, bundle in bundles.items():
            for place in ("disk", "host"):
                began = time.perf_counter()
                await load_async(llm.collective_rpc, bundle.path, bundle.digest)
                if number:
                    found[name][place].append(1e3 * (time.perf_counter() - began))
                await leave(llm, bundle, is_kept=place == "disk")
    return {name: {place: summary(each) for place, each in places.items()} for name, places in found.items()}


async def leave(llm: AsyncLLM, bundle: Stored, *, is_kept: bool) -> None:
    """Unload a bundle, and wait until its place is erased."""
    await llm.collective_rpc("inducekv_unload_bundle", args=(bundle.digest, is_kept))
    while not all(await llm.collective_rpc("inducekv_is_erased", args=(bundle.digest,))):
        await asyncio.sleep(0.001)


@dataclass
class Crowd:
    """Requests that are answered all the time, and the time between their tokens."""

    llm: AsyncLLM
    gaps_ms: list[float] = field(default_factory=list)
    _numbers: Any = field(default_factory=itertools.count)

    def asking(self) -> list[Any]:
        return [self._ask() for _ in range(REQUESTS)]

    async def settled(self) -> None:
        """Wait until all of them are in their answers."""
        self.gaps_ms.clear()
        while len(self.gaps_ms) < 20 * REQUESTS:
            await asyncio.sleep(0.01)
        self.gaps_ms.clear()

    async def _ask(self) -> None:
        params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
        while True:
            prompt, last = {"prompt_token_ids": [1, 2, 3, 4]}, math.nan
            async for _ in self.llm.generate(prompt, params, f"crowd-{next(self._numbers)}"):
                now = time.perf_counter()
                if not math.isnan(last):
                    self.gaps_ms.append(1e3 * (now - last))
                last = now


async def gaps_ms(llm: AsyncLLM, bundles: dict[str, Stored], crowd: Crowd) -> dict[str, Any]:
    """Between two tokens of a request: without loads, and with those of each bundle."""
    found: dict[str, Any] = {}
    async with meanwhile(*crowd.asking()):
        for turn in ("before", "after"):
            found[f"without_{turn}"] = await _gaps(crowd)
            if turn == "before":
                for name, bundle in bundles.items():
                    async with meanwhile(keep_loading(llm, bundle)):
                        found[name] = await _gaps(crowd)
    return found


async def _gaps(crowd: Crowd, seconds: float = 20.0) -> dict[str, float]:
    await crowd.settled()
    await asyncio.sleep(seconds)
    return summary(crowd.gaps_ms)


async def keep_loading(llm: AsyncLLM, bundle: Stored) -> None:
    """From disk, then from host memory, again and again."""
    for is_kept in itertools.cycle((True, False)):
        await load_async(llm.collective_rpc, bundle.path, bundle.digest)
        await asyncio.sleep(PAUSE_S)
        await leave(llm, bundle, is_kept=is_kept)


def summary(values: Sequence[float]) -> dict[str, float]:
    return {"median": round(float(np.median(values)), 2), "p99": round(float(np.percentile(values, 99)), 2)}


if __name__ == "__main__":
    sys.exit(main())
