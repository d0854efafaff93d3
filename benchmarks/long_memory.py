"""Time per output token with one long memory, against the same tokens as a cached prefix of the prompt.

Both read as many keys and values for each request: the memory's once for all requests that share it, those of a prefix
once for each request. Runs alternate in one engine, and there is a third without either. Milliseconds are those of the
process (its CPU time, of one thread), medians over the steps in which every request gets a token.

    OMP_NUM_THREADS=1 python -m benchmarks.long_memory [--output FILE]
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Final

import torch

from benchmarks.real.model import SMOLLM2, model_folder
from benchmarks.record import keep, parser_of
from inducekv_vllm.attention.pool import ENTRY_TOKENS
from inducekv_vllm.bundle import write_bundle
from inducekv_vllm.vllm_seams.config import SCHEDULER_CLS, WORKER_CLS
from selector.backbone.loading import decoder
from selector.backbone.model import Backbone
from selector.imported.bundle import import_source
from selector.imported.prefix import computed
from selector.imported.source import Source

if TYPE_CHECKING:
    from inducekv_vllm.frontend.offline import MemoryLLM
    from inducekv_vllm.frontend.served_bundle import ServedBundle

TOKENS: Final = (512, 2048, 8192)
REQUESTS: Final = (1, 32)
ROUNDS, STEPS = 5, 24  # alternating; steps of each
SPARE: Final = 256  # tokens of a request beside the prefix
KV_CACHE_BYTES: Final = 2 * 2**30


def main(arguments: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--model", help=f"model folder (default: {SMOLLM2})")
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS, help="of the memory: multiples of 128")
    parser.add_argument("--requests", type=int, nargs="+", default=REQUESTS, help="at once")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="of each, alternating (default %(default)s)")
    options = parser.parse_args(arguments)
    model = options.model or str(model_folder())
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        texts, paths = bundles(model, options.tokens, Path(folder))
        offline = start_engine(model, options.tokens, max(options.requests))
        for tokens in options.tokens:
            memory = offline.load_bundle(paths[tokens])
            for requests in options.requests:
                rows.append(compared(offline, memory, texts[tokens], requests, options.rounds))
                print(json.dumps(rows[-1]), flush=True)
    known = {"model": Path(model).name, "threads": torch.get_num_threads(), "rounds": options.rounds, "steps": STEPS}
    keep(known | {"rows": rows}, options.output)
    return 0


def bundles(model: str, sizes: Sequence[int], folder: Path) -> tuple[dict[int, list[int]], dict[int, Path]]:
    """By number of tokens: the first tokens of the Python reference, and a bundle of their keys and values."""
    from pydoc_data.topics import topics

    backbone = Backbone.load(model)
    ids = backbone.tokenizer("\n".join(topics[name] for name in sorted(topics)))["input_ids"]
    table = decoder(backbone.model).get_input_embeddings()
    paths = {}
    for size in sizes:
        embeddings = table(torch.tensor(ids[:size]))  # [size, d]
        source = Source("the Python reference", {}, lambda found, given=embeddings: computed(found, given))
        paths[size] = folder / f"{size}.safetensors"
        write_bundle(import_source(backbone, source, task="reference", dtype="float32"), paths[size])
    return {size: ids[:size] for size in sizes}, paths


def start_engine(model: str, sizes: Sequence[int], requests: int) -> MemoryLLM:
    # Behind 8,192 tokens a request has positions that vLLM has no angles for: its steps take as long, and say nothing.
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1"}
    from vllm import LLM

    from inducekv_vllm.frontend.offline import MemoryLLM

    return MemoryLLM(
        LLM(
            model,
            dtype="float32",
            max_model_len=max(sizes) + SPARE,
            max_num_seqs=requests,
            enforce_eager=True,
            kv_cache_memory_bytes=KV_CACHE_BYTES,
            worker_cls=WORKER_CLS,
            scheduler_cls=SCHEDULER_CLS,
            additional_config={"inducekv": {"memory_pool_entries": -(-sum(sizes) // ENTRY_TOKENS) + 8}},
        )
    )


def compared(offline: MemoryLLM, memory: ServedBundle, prefix: list[int], requests: int, rounds: int) -> dict[str, Any]:
    """Alternating runs: seconds of a step, and whether both answer alike."""
    questions = [offline.llm.get_tokenizer().encode(f"\nQuestion {n}: what is a statement?") for n in range(requests)]
    steps: dict[str, list[float]] = {"memory": [], "prefix": [], "neither": []}
    same = 0
    for number in range(rounds + 1):  # the first fills the prefix cache
        answers = []
        for name, given, first in (("prefix", None, prefix), ("memory", memory, []), ("neither", None, [])):
            prompts = [{"prompt_token_ids": first + question} for question in questions]
            seconds, found = timed(offline, prompts, given)
            answers.append(found)
            if number:
                steps[name] += seconds
        same = sum(a == b for a, b in zip(*answers[:2], strict=True))
    of_step = {name: 1000 * median(seconds) for name, seconds in steps.items()}
    return {
        "tokens": len(prefix),
        "requests": requests,
        "memory_ms": round(of_step["memory"], 3),
        "prefix_ms": round(of_step["prefix"], 3),
        "neither_ms": round(of_step["neither"], 3),
        "ratio": round(of_step["memory"] / of_step["prefix"], 4),
        "same_answers": same,
    }


def timed(offline: MemoryLLM, prompts: list[Any], memory: ServedBundle | None) -> tuple[list[float], list[list[int]]]:
    """Seconds of the steps in which every request gets a token, and each answer's tokens."""
    from vllm import SamplingParams

    engine, seconds = offline.llm.llm_engine, list[float]()
    step: Any = engine.step

    def watched() -> Any:
        start = time.process_time()  # of one thread: other work on the machine does not count
        outputs = step()
        seconds.append(time.process_time() - start)
        return outputs

    engine.step = watched  # type: ignore[method-assign]
    try:
        answers = offline.generate(
            prompts, SamplingParams(temperature=0, max_tokens=STEPS, ignore_eos=True), memory=memory
        )
    finally:
        engine.step = step  # type: ignore[method-assign]
    # The prompts' last tokens are computed first, in one step if the prefix is cached; the last steps may be of few.
    return seconds[1 - STEPS : -1], [list(each.output.outputs[0].token_ids) for each in answers]


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)  # an engine in this process may not end by itself
