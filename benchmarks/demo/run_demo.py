"""The demonstration behind `make demo` and `make demo-real`: a model answers questions, without and with its memory.

Starts `inducekv-serve` on a free local port, asks through the official `openai` client (the base model's name is the
untouched model, the bundle's name the same model with memory), prints what came back, and stops the server.

    python -m benchmarks.demo.run_demo [--model DIR] [--bundle FILE] [--tasks base guild ...] [--questions 2]
    python -m benchmarks.demo.run_demo --real qwen2.5-0.5b [--tasks base valence ...] [--questions 2]

The demo model is asked about pictures. A real model (`benchmarks.real.model`) is taught its memory first, if that is
not done.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import openai
from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from benchmarks.chat import Message, messages_of, question_of, same_answer, user_turn
from benchmarks.demo import real
from benchmarks.demo.world import TASKS, examples
from benchmarks.real.model import MODELS, cache_folder, model_folder
from benchmarks.record import parser_of
from benchmarks.server_process import ServerFailed, serving
from inducekv_vllm.errors import InduceKVError
from selector.client import Server
from selector.data.examples import read_task
from selector.refined.settings import usual_precision
from server.demo import BUNDLE, CHECKPOINT

MAX_TOKENS = 16
# By default vLLM takes a share of the machine's memory on a CPU, and does not start where others have that memory.
KV_CACHE_GIB = "VLLM_CPU_KVCACHE_SPACE"


@dataclass(frozen=True)
class Reply:
    text: str
    trace: dict[str, Any] | None  # the server's report on retrieval, for a request that used memory


@contextmanager
def served(model: Path, bundle: Path, arguments: Sequence[str], console: Console) -> Iterator[openai.OpenAI]:
    """A client of a server of `arguments`. Raises ServerFailed: it does not start."""
    console.print(f"starting inducekv-serve on {model.name} with {bundle.name} ...")
    start = time.perf_counter()
    environment = {KV_CACHE_GIB: os.environ.get(KV_CACHE_GIB, "1")}
    with tempfile.TemporaryDirectory() as folder, serving(arguments, Path(folder) / "server.log", environment) as url:
        console.print(f"serving at {url} after {time.perf_counter() - start:.0f} s")
        yield openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


def ask(client: openai.OpenAI, model: str, messages: Sequence[Message], *, trace: bool) -> Reply:
    response = client.chat.completions.create(
        model=model,
        messages=messages,  # type: ignore[arg-type]
        temperature=0.0,
        max_tokens=MAX_TOKENS,
        extra_body={"vllm_xargs": {"inducekv_trace": 1}} if trace else None,
    )
    extra = response.model_extra or {}
    report = (extra.get("kv_transfer_params") or {}).get("inducekv") if trace else None
    return Reply((response.choices[0].message.content or "").strip(), report)


def base_model(client: openai.OpenAI, bundle: str) -> str:
    """The name of the untouched model beneath a bundle."""
    return Server(str(client.base_url).removesuffix("/v1/")).base_model(bundle)


def marked(text: str, answer: str) -> str:
    """Green if it is right, else red."""
    return f"[{'green' if same_answer(text, answer) else 'red'}]{escape(text) or '(nothing)'}[/]"


def gate_is_open(trace: dict[str, Any]) -> bool:
    """Whether the request got memory; a memory without a gate always does."""
    return trace["gate"] is None or bool(trace["gate"]["open"])


MEMORY = "demo-memory"


class Question(NamedTuple):
    task: str
    messages: list[Message]
    text: str  # of the last message
    answer: str


def about_pictures(tasks: Sequence[str], split: str, count: int) -> Iterator[Question]:
    for task in tasks:
        for record, pixels in examples(task, split, count):
            text = question_of(record)
            yield Question(task, [user_turn(pixels, text)], text, record["answer"])


def about_text(data: Path, tasks: Sequence[str], split: str, count: int) -> Iterator[Question]:
    for task in tasks:
        for example in read_task(data / task / f"{split}.jsonl")[:count]:
            messages = messages_of(example)
            yield Question(task, messages, "\n".join(part["text"] for part in messages[-1]["content"]), example.answer)


def run(client: openai.OpenAI, warm_up: Question, questions: Sequence[Question], console: Console) -> None:
    base = base_model(client, MEMORY)
    for model in (base, MEMORY):  # the first request of each kind, which must not be in the table
        ask(client, model, warm_up.messages, trace=False)

    head = ("task", "question", "expected", "no memory", "with memory", "gate")
    columns = [Column(label, overflow="fold", min_width=32 if label == "question" else None) for label in head]
    table = Table(
        *columns, title="The same frozen model, without and with its memory", box=SIMPLE, padding=(0, 1, 0, 0)
    )
    right = {base: 0, MEMORY: 0}
    for task, messages, text, answer in questions:
        plain = ask(client, base, messages, trace=False)
        memory = ask(client, MEMORY, messages, trace=True)
        assert memory.trace is not None, "a request that used memory and asked for its trace came back without one"
        for model, reply in ((base, plain), (MEMORY, memory)):
            right[model] += same_answer(reply.text, answer)
        replies = (marked(reply.text, answer) for reply in (plain, memory))
        table.add_row(task, escape(text), answer, *replies, "open" if gate_is_open(memory.trace) else "closed")
    console.print(table)
    total = len(questions)
    console.print(f"right without memory: {right[base]} of {total}; with memory: {right[MEMORY]} of {total}")


def server_arguments(model: Path, bundle: Path, dtype: str = "float32") -> list[str]:
    # The demo's checkpoint declares float32, and its accuracy was measured so; vLLM would choose bfloat16.
    precision = ["--dtype", dtype]
    limits = ["--max-num-seqs", "4", "--kv-cache-memory-bytes", str(256 << 20)]  # plenty for one question at a time
    return [str(model), "--memory", f"{MEMORY}={bundle}", *precision, *limits]


def main() -> int:
    parser = parser_of(__doc__, has_result=False)
    add = parser.add_argument
    add("--model", type=Path, default=CHECKPOINT, metavar="DIR", help="the demo model")
    add("--real", metavar="MODEL", help=f"in its place: {', '.join(MODELS)}, a folder, or a name of the hub")
    add("--bundle", type=Path, default=BUNDLE, help="of the demo model")
    add("--tasks", nargs="+", metavar="TASK", help="(default: all)")
    add("--questions", type=int, default=1, help="questions a task")
    args = parser.parse_args()
    known = ("base", *real.TASKS) if args.real else TASKS
    tasks = args.tasks or known
    if unknown := [task for task in tasks if task not in known]:
        parser.error(f"--tasks must be of {', '.join(known)}, found {unknown[0]}")
    console = Console(width=None if sys.stdout.isatty() else 100)
    for path in () if args.real else (args.model, args.bundle):
        if not path.exists():
            parser.error(f"{path}: not found")
    try:
        if args.real:
            model, dtype = model_folder(args.real), usual_precision()
            folder = cache_folder() / "demo-real" / model.name
            bundle = real.teach(folder, model, console)
            (warm_up,) = about_text(folder / "data", tasks[:1], "validation", 1)
            questions = list(about_text(folder / "data", tasks, "test", args.questions))
            more = list(real.SERVING)
        else:
            model, bundle, dtype, more = args.model, args.bundle, "float32", []
            (warm_up,) = about_pictures(tasks[:1], "validation", 1)
            questions = list(about_pictures(tasks, "test", args.questions))
        with served(model, bundle, [*server_arguments(model, bundle, dtype), *more], console) as client:
            run(client, warm_up, questions, console)
    except (InduceKVError, ServerFailed) as error:
        console.print(f"[red]error:[/] {escape(str(error))}")
        return 1
    except KeyboardInterrupt:
        console.print("stopped")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
