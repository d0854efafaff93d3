"""The serving benchmark: `python -m benchmarks.serving.run [--model demo|GEOMETRY|DIR] [--budget SECONDS] [--smoke]`.

`benchmarks/serving/__init__.py` describes the methods and the measurement. The tables go to
`benchmarks/results/serving_MODEL_DTYPE.json`, or to `--output`, anew after each block of requests; the blocks lie
beside it, a line each, in `....blocks.jsonl`. A run that is cut off has lost the block that was on its way. The last
line of the output is one JSON object. The exit status is 1 if a server has not started or a request has failed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import torch
from rich.console import Console

from benchmarks.chat import chat_body
from benchmarks.geometries import GEOMETRIES
from benchmarks.machine import describe_machine
from benchmarks.record import command, parser_of
from benchmarks.server_process import ServerFailed
from benchmarks.serving import report
from benchmarks.serving.bundles import SEED
from benchmarks.serving.cells import Cell, cell
from benchmarks.serving.client import ask_together, session, trace
from benchmarks.serving.files import (
    Files,
    cache_bytes,
    cache_tokens,
    context_of,
    flags,
    make_files,
    model_folder,
)
from benchmarks.serving.methods import (
    PROMPT_REPLAY,
    SERVERS,
    Method,
    Server,
    chosen,
    gated_name,
    make_methods,
    methods_in,
)
from benchmarks.serving.passes import Passes
from benchmarks.serving.prompts import EXEMPLARS, PromptMaker
from benchmarks.serving.servers import Command, commands, side_by_side

BEGAN = time.monotonic() - (time.time() - psutil.Process().create_time())  # what is imported counts as well
RESULTS = Path(__file__).parents[1] / "results"
CELLS_ON_CPU = ("1x256", "4x256", "16x256", "1x256p", "1x256b")
CELLS_ON_GPU = ("1x256", "8x256", "64x256", "1x2048", "1x256b", "1x256p", "8x2048", "64x2048")
SMOKE_CELLS = ("1x256p", "2x256")
STARTING = 0.7  # the part of the budget in which the servers must have started
ENDING_SECONDS = 5  # of the budget
TRACED = Cell(1, 256, picture=True)
REPORTED = ("layers", "dtype", "output_tokens", "lora_rank", "budget", "smoke")


def main() -> int:
    args = parse_arguments()
    with tempfile.TemporaryDirectory() as folder:
        work = args.work or Path(folder)
        work.mkdir(parents=True, exist_ok=True)
        model, is_dummy = model_folder(args.model, args.layers, args.dtype, work)
        context = context_of(model)
        prompts = PromptMaker(model, SEED)
        every = make_methods(prompts, context, args.output_tokens)
        methods = chosen(every, args.methods, args.servers)
        files = make_files(model, is_dummy, [method.model for method in methods], args.lora_rank, args.dtype, work)
        plan = {each: methods_in(each, methods, context, args.output_tokens) for each in args.cells}
        needed = cache_tokens(plan, context, args.output_tokens)
        size, left_out = cache_bytes(needed, files, len(args.servers))
        plan = {each: asked for each, asked in plan.items() if each not in left_out}
        record = report.Record(args.output or work / "result.json", described(args, files, left_out), bases(methods))
        starts = started_as(args, files, methods, context, size, prompts.takes_pictures, work)
        try:
            with side_by_side(starts, work, STARTING * args.budget) as (urls, not_started):
                record.tell(not_started=not_started, ready_after_s=seconds())
                asyncio.run(measure(urls, plan, methods, record, args))
        except ServerFailed as error:
            record.tell(not_started=str(error))
        finally:
            record.tell(seconds=seconds())
            report.show(record.result, Console(width=None if sys.stdout.isatty() else 140))
            print(json.dumps(record.result))
    return int(bool(record.result["not_started"] or record.result["failed_requests"]))


def seconds() -> float:
    """Since the start of the run."""
    return round(time.monotonic() - BEGAN, 1)


def described(args: argparse.Namespace, files: Files, left_out: list[Cell]) -> dict[str, Any]:
    """What is known before a server is asked."""
    return {
        "benchmark": "serving",
        "command": command(),
        "model": Path(args.model).name,
        **{name: getattr(args, name) for name in REPORTED},
        "weights": "made by vLLM" if files.is_dummy else "of the checkpoint",
        "weights_gib": round(files.weights_bytes / 2**30, 2),
        "stored_bytes": files.stored_bytes,
        "cells_without_room": [each.name for each in left_out],
        "machine": describe_machine(),
    }


def bases(methods: list[Method]) -> dict[str, dict[str, str]]:
    return {method.name: method.bases for method in methods}


def started_as(
    args: argparse.Namespace,
    files: Files,
    methods: list[Method],
    context: int,
    kv_cache_bytes: int,
    takes_pictures: bool,
    work: Path,
) -> dict[Server, Command]:
    """The servers of the run."""
    replays = any(method.name == PROMPT_REPLAY for method in methods)
    pictures = (EXEMPLARS + 1 if replays else 1) if takes_pictures else 0
    requests = max(each.concurrency for each in args.cells)
    shared = [*flags(context, requests, pictures, kv_cache_bytes, args.dtype, files.is_dummy), *args.serve_args]
    every = commands(files, args.lora_rank, shared, work)
    return {name: every[name] for name in args.servers}


async def measure(
    urls: dict[Server, str],
    plan: dict[Cell, list[Method]],
    methods: list[Method],
    record: report.Record,
    args: argparse.Namespace,
) -> None:
    """Ask each gate once what it decides, and then go over the cells until the budget is spent."""
    plan = {each: [method for method in asked if method.server in urls] for each, asked in plan.items()}
    async with session() as client:

        async def ask(shape: Cell, method: Method, count: int, tokens: int) -> Any:
            requests = [request_of(method, shape, tokens) for _ in range(count)]
            return await ask_together(client, urls[method.server], requests, shape.concurrency)

        traces = {}
        for method in methods:
            if method.server in urls and method.name.startswith(gated_name("")):
                traces[method.name] = await trace(client, urls[method.server], request_of(method, TRACED, 2)["body"])
        record.tell(traces=traces)
        passes = Passes(ask, record.keep, plan, args.output_tokens, BEGAN + args.budget - ENDING_SECONDS)
        record.tell(passes=await passes.run(args.passes))


def request_of(method: Method, shape: Cell, tokens: int) -> dict[str, Any]:
    body = chat_body(method.model, method.messages(shape), tokens, method.xargs)
    return {"body": body} | ({"then": method.then()} if method.then else {})


def parse_arguments() -> argparse.Namespace:
    parser = parser_of(__doc__)
    models = f"demo, a checkpoint's folder, or a geometry (vLLM makes its weights): {', '.join(GEOMETRIES)}"
    add = parser.add_argument
    add("--model", default="80m", help=models)
    add("--layers", type=int, help="of a geometry: a cut of it")
    # Left to itself vLLM serves a float32 checkpoint in bfloat16.
    dtypes = "(default: float32 on a CPU, bfloat16 on a GPU, where FlashAttention has no float32)"
    add("--dtype", choices=("float32", "bfloat16", "float16"), help=dtypes)
    shapes = "CONCURRENCYxTOKENS, prompts of about so many tokens; then p: each with a picture; b: of exactly so many"
    add("--cells", nargs="+", type=cell, metavar="CELL", help=shapes)
    add("--budget", type=float, default=1800.0, metavar="SECONDS", help="for all of it, the start included")
    add("--passes", type=int, help="over all cells, at most (default: until the budget is spent)")
    add("--output-tokens", type=int, help="of each request (default: 32 on a CPU, 64 on a GPU)")
    add("--methods", nargs="+", metavar="PREFIX", help="only methods whose names begin so, LoRA, and their bases")
    add("--servers", nargs="+", choices=SERVERS, default=list(SERVERS), help="default: all three")
    add("--lora-rank", type=int, default=16)
    add("--work", type=Path, help="a new folder that keeps model, bundles and logs")
    add("--smoke", action="store_true", help="one short pass: shows that it runs, measures nothing")
    add("--serve-args", nargs=argparse.REMAINDER, default=[], help="flags for every server, last of all")
    args = parser.parse_args()
    if args.work is not None and args.work.exists():
        parser.error(f"--work must be a new folder, found {args.work}")
    most_layers = GEOMETRIES[args.model].layers if args.model in GEOMETRIES else 0
    if args.layers is not None and not 0 < args.layers <= most_layers:
        parser.error(f"--layers cuts a geometry: expected 1 to {most_layers} of {args.model}, found {args.layers}")
    if args.budget <= 0 or (args.passes is not None and args.passes < 1):
        parser.error("--budget must be positive and --passes at least 1")
    on_gpu = torch.cuda.is_available()
    if on_gpu and args.dtype == "float32":
        parser.error("--dtype float32 cannot be measured on a GPU: merged memory needs FlashAttention, which has none")
    args.dtype = args.dtype or ("bfloat16" if on_gpu else "float32")
    args.output_tokens = args.output_tokens or (64 if on_gpu else 32)
    if args.output_tokens < 2:
        parser.error("--output-tokens must be at least 2")
    args.cells = args.cells or [cell(each) for each in (CELLS_ON_GPU if on_gpu else CELLS_ON_CPU)]
    if args.smoke:
        args.passes, args.output_tokens, args.cells = 1, 4, [cell(each) for each in SMOKE_CELLS]
    elif args.output is None:
        args.output = RESULTS / f"serving_{Path(args.model).name}_{args.dtype}.json"
    return args


if __name__ == "__main__":
    sys.exit(main())
