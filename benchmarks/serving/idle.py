"""What the plugin costs a request that has no memory: the same engine with it and without, by turns.

    python -m benchmarks.serving.idle [--rounds N] [--output FILE]

Two engines of the demo model run in this process. A round asks each of them the same prompts, which it has not seen:
one alone and eight together. The engine with the plugin has the demo bundle loaded. Prints medians and their ratios,
and one JSON object as the last line.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.machine import describe_machine

PROMPT, OUTPUT = 256, 32  # tokens
TOGETHER = (1, 8)
SETTINGS: dict[str, Any] = {"dtype": "float32", "max_model_len": 512, "max_num_seqs": 8, "seed": 0}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--output", type=Path, help="write the result to this JSON file")
    args = parser.parse_args()
    engines = {"vLLM": make_engine(plugin=False), "with the plugin": make_engine(plugin=True)}
    seconds: dict[str, dict[int, list[float]]] = {name: {n: [] for n in TOGETHER} for name in engines}
    for round_number in range(-1, args.rounds):  # the first one warms up
        for n in TOGETHER:
            for name in sorted(engines, reverse=bool(round_number % 2)):
                took = timed(engines[name], prompts(n, round_number))
                if round_number >= 0:
                    seconds[name][n].append(took)
    medians = {name: {n: statistics.median(each) for n, each in by.items()} for name, by in seconds.items()}
    ratios = {n: medians["with the plugin"][n] / medians["vLLM"][n] for n in TOGETHER}
    for n in TOGETHER:
        print(f"{n} together: {1e3 * medians['vLLM'][n]:.1f} ms in vLLM, {ratios[n]:.3f} times that with the plugin")
    result = {"benchmark": "idle", "rounds": args.rounds, "prompt_tokens": PROMPT, "output_tokens": OUTPUT}
    result |= {"seconds": medians, "ratio": ratios, "machine": describe_machine()}
    if args.output is not None:
        args.output.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))
    return 0


def make_engine(*, plugin: bool) -> Any:
    """A `vllm.LLM` whose engine runs in this process."""
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_PLUGINS": "inducekv" if plugin else ""}
    from vllm import LLM

    from inducekv_vllm.engine.offline import MemoryLLM
    from inducekv_vllm.host.config import SCHEDULER_CLS, WORKER_CLS
    from server.demo import BUNDLE, CHECKPOINT

    ours = {"worker_cls": WORKER_CLS, "scheduler_cls": SCHEDULER_CLS, "additional_config": {"inducekv": {}}}
    llm = LLM(str(CHECKPOINT), **SETTINGS, **(ours if plugin else {}))
    if plugin:
        MemoryLLM(llm).load_bundle(BUNDLE)
    return llm


def prompts(n: int, round_number: int) -> list[Any]:
    """n prompts of tokens that no other round has."""
    from vllm.inputs import TokensPrompt

    first = 1000 * (round_number + 2) + 100 * n
    return [
        TokensPrompt(prompt_token_ids=[20 + (first + 37 * i + at * (at + i + 3)) % 400 for at in range(PROMPT)])
        for i in range(n)
    ]


def timed(llm: Any, asked: list[Any]) -> float:
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=OUTPUT, ignore_eos=True)
    began = time.perf_counter()
    llm.generate(asked, params, use_tqdm=False)
    return time.perf_counter() - began


if __name__ == "__main__":
    sys.exit(main())
