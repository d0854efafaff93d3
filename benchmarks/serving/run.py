"""The serving benchmark: `python -m benchmarks.serving.run [--model demo|GEOMETRY|DIR] [--smoke]`.

`benchmarks/serving/__init__.py` describes the methods and the measurement. Prints a table for each concurrency, the
targets, and one JSON object as the last line; the same object goes to `benchmarks/results/serving_MODEL_DTYPE.json`
(not with --smoke; `..._TOKENS.json` for prompts of another length), or to `--output`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers import AutoConfig

from benchmarks.chat import chat_body, question_of
from benchmarks.demo.world import examples, write_task
from benchmarks.geometries import GEOMETRIES
from benchmarks.lora_adapter import served_rank
from benchmarks.machine import describe_machine
from benchmarks.server_process import serving
from benchmarks.serving import report
from benchmarks.serving.bundles import SEED, build_bundles, make_model, save_adapter, stored_bytes
from benchmarks.serving.methods import (
    BASE_METHOD,
    BUDGETS,
    DECOUPLED_BUDGET,
    LORA,
    PROMPT_TOKENS,
    Method,
    lora_methods,
    make_methods,
)
from benchmarks.serving.prompts import Exemplar, PromptMaker
from inducekv_vllm.bundle.activation import ACTIVATIONS
from selector.backbone.model import Backbone
from server.demo import CHECKPOINT

LOCUSTFILE = Path(__file__).with_name("locustfile.py")
KV_CACHE_BYTES = 2 << 30  # at least
POOL_ENTRIES = 2 * (sum(BUDGETS) + len(ACTIVATIONS) * DECOUPLED_BUDGET)  # room for all bundles, and for as many more
RESULTS = Path(__file__).parents[1] / "results"
SERVED_NAME = "base"
TASK = "guild"  # the stream task whose examples fill the bundles
REPORTED = ("model", "dtype", "attention_backend", "prompt_tokens", "output_tokens", "smoke")


def main() -> int:
    args = parse_arguments()
    console = Console(width=None if sys.stdout.isatty() else 140)
    with tempfile.TemporaryDirectory() as folder:
        work = args.work or Path(folder)
        work.mkdir(parents=True, exist_ok=True)
        model = resolve_model(args.model, args.dtype, work)
        prompts = PromptMaker(model, exemplars(), SEED)
        context = AutoConfig.from_pretrained(model).text_config.max_position_embeddings
        every = make_methods(prompts, SERVED_NAME, context, args.output_tokens, args.prompt_tokens)
        methods, rivals = chosen(every, args.methods), lora_methods(prompts, SERVED_NAME, args.prompt_tokens)
        backbone = Backbone.load(model, getattr(torch, args.dtype))
        write_task(work / TASK, TASK, {"train": max(BUDGETS)})
        bundles = build_bundles(backbone, model, {each.model for each in methods}, work / TASK / "train.jsonl", work)
        adapter, rank, adapter_bytes = save_adapter(backbone, work)
        del backbone
        with serving(server_arguments(model, bundles, context, args), work / "server.log") as url:
            measured = measure(url, "memory", methods, args, work)
        with serving(lora_server_arguments(model, adapter, rank, context, args), work / "server-lora.log") as url:
            for concurrency, blocks in measure(url, "lora", rivals, args, work).items():
                measured[concurrency] |= blocks
        stored = {method.name: stored_bytes(bundles, method.model) for method in methods} | {LORA: adapter_bytes}
    rows = report.tabulate(measured, {method.name: method.base for method in (*methods, *rivals)})
    result = {
        "benchmark": "serving",
        "command": " ".join(["python -m benchmarks.serving.run", *sys.argv[1:]]),
        **{name: getattr(args, name) for name in REPORTED},
        "lora_rank": rank,
        "stored_bytes": stored,
        "concurrency": rows,
        "machine": describe_machine(),
    }
    result["targets"] = report.check_targets(rows["1"])
    report.show(result, console)
    if not args.smoke:
        RESULTS.mkdir(exist_ok=True)
        length = "" if args.prompt_tokens == PROMPT_TOKENS else f"_{args.prompt_tokens}"
        path = args.output or RESULTS / f"serving_{Path(args.model).name}_{args.dtype}{length}.json"
        path.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result))
    return 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    models = f"demo, a checkpoint's folder, or a geometry (untrained, made here): {', '.join(GEOMETRIES)}"
    parser.add_argument("--model", default="80m", help=models)
    # Left to itself vLLM serves a float32 checkpoint in bfloat16.
    dtypes = "(default: float32 on a CPU, bfloat16 on a GPU, where FlashAttention has no float32)"
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help=dtypes)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 4, 16], help="must include 1")
    parser.add_argument("--rounds", type=int, default=8, help="turns of each method at concurrency 1")
    parser.add_argument("--prompt-tokens", type=int, default=PROMPT_TOKENS)
    parser.add_argument("--output-tokens", type=int, default=32)
    parser.add_argument("--methods", nargs="+", metavar="PREFIX", help="only methods whose names begin so, and `none`")
    parser.add_argument("--work", type=Path, help="a new folder that keeps the model, logs and each block's timings")
    parser.add_argument("--output", type=Path, help="the JSON file (default: in benchmarks/results)")
    parser.add_argument("--smoke", action="store_true", help="one short round: shows that it runs, measures nothing")
    parser.add_argument("--serve-args", nargs=argparse.REMAINDER, default=[], help="flags for the server, last of all")
    args = parser.parse_args()
    if 1 not in args.concurrency or min(args.concurrency) < 1:
        parser.error("--concurrency takes positive numbers, 1 among them")
    if args.work is not None and args.work.exists():
        parser.error(f"--work must be a new folder, found {args.work}")
    if args.rounds < 1 or args.output_tokens < 2:
        parser.error("--rounds must be at least 1 and --output-tokens at least 2")
    on_gpu = torch.cuda.is_available()
    if on_gpu and args.dtype == "float32":
        parser.error("--dtype float32 cannot be measured on a GPU: merged memory needs FlashAttention, which has none")
    args.dtype = args.dtype or ("bfloat16" if on_gpu else "float32")
    # Others, which vLLM prefers on some GPUs, give no log-sum-exp for merged memory.
    args.attention_backend = "FLASH_ATTN" if on_gpu else None
    if args.smoke:
        args.rounds, args.output_tokens, args.concurrency = 1, 4, [1, 2]
    return args


def resolve_model(name: str, dtype: str, work: Path) -> Path:
    """The checkpoint's folder."""
    if name in GEOMETRIES:
        return make_model(GEOMETRIES[name], dtype, work / name)
    return CHECKPOINT if name == "demo" else Path(name)


def exemplars() -> list[Exemplar]:
    """Enough for the largest bundle."""
    found = examples(TASK, "train", max(BUDGETS))
    return [Exemplar(pixels, question_of(record), record["answer"]) for record, pixels in found]


def server_arguments(model: Path, bundles: dict[str, Path], context: int, args: argparse.Namespace) -> list[str]:
    memories = [part for name, path in bundles.items() for part in ("--memory", f"{name}={path}")]
    memories += ["--memory-pool-entries", str(POOL_ENTRIES)]
    limits = ["--dtype", args.dtype, "--max-model-len", str(context), "--max-num-seqs", str(max(args.concurrency))]
    limits += ["--kv-cache-memory-bytes", str(kv_cache_bytes(model, context, max(args.concurrency), args.dtype))]
    limits += ["--limit-mm-per-prompt", json.dumps({"image": 257})]
    if args.attention_backend is not None:
        limits += ["--attention-backend", args.attention_backend]
    return [str(model), "--served-model-name", SERVED_NAME, *memories, *limits, *args.serve_args]


def kv_cache_bytes(model: Path, context: int, requests: int, dtype: str) -> int:
    """Room for `requests` at full context."""
    text = AutoConfig.from_pretrained(model).text_config
    token = 2 * getattr(torch, dtype).itemsize * text.num_hidden_layers * text.num_key_value_heads * text.head_dim
    return max(KV_CACHE_BYTES, requests * context * token)


def lora_server_arguments(model: Path, adapter: Path, rank: int, context: int, args: argparse.Namespace) -> list[str]:
    flags = [
        "--enable-lora",
        "--max-lora-rank",
        str(served_rank(rank, "the adapter")),
        "--lora-modules",
        f"{LORA}={adapter}",
    ]
    return [*server_arguments(model, {}, context, args), *flags]


def chosen(methods: list[Method], prefixes: Sequence[str] | None) -> list[Method]:
    """The methods whose names begin with one of `prefixes`, and what they are compared with."""
    if prefixes is None:
        return methods
    names = {method.name for method in methods if method.name.startswith(tuple(prefixes))}
    bases = {BASE_METHOD} | {method.base for method in methods if method.name in names}
    return [method for method in methods if method.name in names | bases]


def measure(url: str, server: str, methods: list[Method], args: argparse.Namespace, work: Path) -> report.Measured:
    """All methods in turn, round after round, at each concurrency, after one round that warms up and is dropped."""
    measured: report.Measured = {concurrency: defaultdict(list) for concurrency in args.concurrency}
    plan = [(None, method) for method in methods]  # in the order of sending: its concurrency (None: dropped)
    for concurrency in args.concurrency:
        # More requests a round at higher concurrency, so fewer rounds give as many timings.
        rounds = max(1 if args.smoke else 2, args.rounds // concurrency)
        plan += [(concurrency, method) for _ in range(rounds) for method in methods]
    blocks, timings = work / f"blocks-{server}.jsonl", work / f"timings-{server}.jsonl"
    with blocks.open("w") as file:
        for concurrency, method in plan:
            file.write(json.dumps(block_of(method, concurrency or 1, args.output_tokens)) + "\n")
    command = [sys.executable, "-m", "locust", "-f", LOCUSTFILE, "--host", url, "--headless", "--only-summary"]
    command += ["-u", "1", "--loglevel", "WARNING", "--blocks", blocks, "--timings", timings]
    subprocess.run([str(part) for part in command], check=True, stdout=sys.stderr, cwd=LOCUSTFILE.parents[2])
    for (concurrency, method), line in zip(plan, timings.read_text().splitlines(), strict=True):
        if concurrency is not None:
            measured[concurrency][method.name].append(json.loads(line))
    return measured


def block_of(method: Method, concurrency: int, output_tokens: int) -> dict[str, Any]:
    """One block: a single request alone, otherwise two requests for each place."""
    requests = []
    for _ in range(1 if concurrency == 1 else 2 * concurrency):
        body = chat_body(method.model, method.messages(), output_tokens, method.xargs)
        requests.append({"body": body} | ({"then": method.then()} if method.then else {}))
    return {"method": method.name, "concurrency": concurrency, "requests": requests}


if __name__ == "__main__":
    sys.exit(main())
