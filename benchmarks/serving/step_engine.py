"""An engine in this process whose decoding steps are timed and profiled: started by `benchmarks.serving.steps`."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks.serving.step_record import StepRecord

if TYPE_CHECKING:
    from vllm import LLM

    from inducekv_vllm.frontend.offline import MemoryLLM
    from inducekv_vllm.frontend.served_bundle import ServedBundle
    from inducekv_vllm.protocol import Decision

SETTLING = 12  # steps: prompts, a gate's decision, what is compiled
TIMED = 18  # steps
SPARE = 10  # tokens of each request beyond the steps that are looked at
CONTEXT = 4096
KV_CACHE_GIB = 8, 0.25  # on a GPU, on a CPU
MOST_KERNELS = 60  # of a row
WORDS = " red blue green" * 80
PROMPTS = 13  # of which the first is not counted
FIRST_PROMPT = 10_000  # the numbers of what was asked before are lower
RUNTIME_CALLS = (
    "cudaLaunch",
    "cudaMemcpy",
    "cudaMemset",
    "cudaStream",
    "cudaEvent",
    "cudaGraph",
    "cudaDevice",
    "cuLaunch",
)


def main(asked: dict[str, Any]) -> None:
    """A row for each method and number of requests."""
    record = StepRecord(Path(asked["output"]))
    llm = start_engine(asked)
    offline, memories = loaded(llm, asked)
    for name, memory in memories.items():
        for requests in asked["requests"]:
            try:
                with limited(asked["limit"]):
                    row = profiled(llm, offline, memory, requests, asked["steps"])
            except Exception as error:
                abort_all(llm)
                row = {"failed": f"{type(error).__name__}: {error}"[:600]}
            record.keep(name, requests, row)


def start_engine(asked: dict[str, Any]) -> LLM:
    """With the plugin's worker and scheduler, or without."""
    from vllm import LLM

    from inducekv_vllm.vllm_seams.config import SCHEDULER_CLS, WORKER_CLS

    on_gpu = torch.cuda.is_available()
    options: dict[str, Any] = {"attention_backend": "FLASH_ATTN"} if on_gpu else {"enforce_eager": True}
    if asked["plugin"]:
        options |= {"worker_cls": WORKER_CLS, "scheduler_cls": SCHEDULER_CLS}
        options["additional_config"] = {"inducekv": {"memory_pool_entries": 128}}
    return LLM(
        asked["model"],
        dtype=asked["dtype"],
        load_format="dummy",
        seed=0,
        max_model_len=CONTEXT,
        max_num_seqs=max(asked["requests"]),
        kv_cache_memory_bytes=int(KV_CACHE_GIB[0 if on_gpu else 1] * 2**30),
        limit_mm_per_prompt={"image": 1},
        **options,
    )


def loaded(llm: LLM, asked: dict[str, Any]) -> tuple[MemoryLLM | None, dict[str, ServedBundle | None]]:
    """The engine as one that takes memories, if it does, and each method's memory."""
    if not asked["plugin"]:
        return None, dict.fromkeys(asked["memories"])
    from inducekv_vllm.frontend.offline import MemoryLLM

    offline = MemoryLLM(llm)
    paths = asked["memories"].items()
    return offline, {name: None if path is None else offline.load_bundle(path) for name, path in paths}


def profiled(
    llm: LLM, offline: MemoryLLM | None, memory: ServedBundle | None, requests: int, steps: int
) -> dict[str, Any]:
    """The row of `requests` requests that generate together."""
    from vllm import SamplingParams

    def ask(numbers: Iterable[int], tokens: int) -> list[Decision | None]:
        chats = [[{"role": "user", "content": f"how many squares are there {n}{WORDS}"}] for n in numbers]
        params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        if offline is None or memory is None:
            llm.chat(chats, params, use_tqdm=False)
            return []
        return [answer.decision for answer in offline.chat(chats, params, memory=memory)]

    with watched(llm.llm_engine, steps) as seen:
        decisions = ask(range(requests), SETTLING + TIMED + steps + SPARE)
    row = row_of(seen.seconds, seen.events, steps) | decided([each for each in decisions if each is not None])
    return row | of_prompts(llm.llm_engine, ask, requests)


def of_prompts(engine: Any, ask: Callable[[Iterable[int], int], object], requests: int) -> dict[str, float]:
    """All steps of one token's answers to new prompts: their milliseconds, and how many they are."""
    spent, step = list[list[float]](), engine.step

    def timed() -> Any:
        start = time.perf_counter()
        outputs = step()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        spent[-1].append(time.perf_counter() - start)
        return outputs

    engine.step = timed
    try:
        for turn in range(1, PROMPTS + 1):
            spent.append([])
            ask(range(turn * FIRST_PROMPT, turn * FIRST_PROMPT + requests), 1)
    finally:
        engine.step = step
    return {
        "prompt_ms": round(1000 * median(map(sum, spent[1:])), 4),
        "prompt_steps": median(map(len, spent[1:])),
    }


def decided(decisions: Sequence[Decision]) -> dict[str, int]:
    """Of how many requests the gate was open, and memory began in the pass that decided it."""
    if not decisions:
        return {}
    return {
        "open": sum(each.task is not None for each in decisions),
        "same_pass": sum(each.same_pass for each in decisions),
    }


class Seen:
    """Of an engine's steps: seconds of those that are timed, and the profiler's events of those that follow."""

    def __init__(self, step: Callable[[], Any], steps: int) -> None:
        self.seconds: list[float] = []
        self.events: list[Any] = []
        self._step, self._steps, self._done = step, steps, 0
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
        self._profiler = profile(activities=activities)

    def __call__(self) -> Any:
        first = SETTLING + TIMED
        if self._done == first:
            self._profiler.__enter__()
        start = time.perf_counter()
        outputs = self._step()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        if SETTLING <= self._done < first:
            self.seconds.append(time.perf_counter() - start)
        self._done += 1
        if self._done == first + self._steps:
            self._profiler.__exit__(None, None, None)
            self.events = list(self._profiler.events())
        return outputs


@contextmanager
def watched(engine: Any, steps: int) -> Iterator[Seen]:
    """The engine's steps go through what is yielded."""
    step = engine.step
    engine.step = seen = Seen(step, steps)
    try:
        yield seen
    finally:
        engine.step = step


def row_of(seconds: list[float], events: Iterable[Any], steps: int) -> dict[str, Any]:
    """Numbers of one step: `kernels` has for each name its launches and their microseconds."""
    launches, spent, calls = Counter[str](), Counter[str](), Counter[str]()
    for event in events:
        if event.device_type == DeviceType.CUDA:
            launches[event.name[:110]] += 1
            spent[event.name[:110]] += event.device_time
        elif event.name.startswith(RUNTIME_CALLS):
            calls[event.name] += 1
    row: dict[str, Any] = {"step_ms": round(1000 * median(seconds), 4)}
    if not launches:
        return row
    kernels = {name: [round(n / steps, 2), round(spent[name] / steps, 2)] for name, n in launches.most_common()}
    return row | {
        "device_launches": round(launches.total() / steps, 2),
        "copies": round(sum(n for name, n in launches.items() if name.startswith("Memcpy")) / steps, 2),
        "device_ms": round(spent.total() / 1000 / steps, 4),
        "host_calls": {name: round(n / steps, 2) for name, n in calls.most_common()},
        "kernels": dict(list(kernels.items())[:MOST_KERNELS]),
    }


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raises TimeoutError inside the block after so long; a call that is not Python's ends first."""

    def stop(*_: Any) -> None:
        raise TimeoutError(f"not done in {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def abort_all(llm: LLM) -> None:
    """What a failed method has left in the engine would be part of the next one's steps."""
    engine = llm.llm_engine
    engine.abort_request(list(engine.output_processor.request_states), internal=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
    sys.stdout.flush()
    os._exit(0)  # an engine in this process may not end by itself
