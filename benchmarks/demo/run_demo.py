"""The demonstration behind `make demo` and `make demo-real`: a model answers questions, without and with its memory.

Starts `inducekv-serve` on a free local port, asks through the official `openai` client (the base model's name is the
untouched model, the bundle's name the same model with memory), prints what came back, and stops the server.

    python -m benchmarks.demo.run_demo [--model DIR] [--bundle FILE] [--tasks base guild ...] [--questions 2]
    python -m benchmarks.demo.run_demo --model smollm2 [--tasks base valence ...] [--questions 2]

The demo model is asked about pictures. SmolLM2 is taught its memory first, if that is not done.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import openai
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from benchmarks.chat import Message, messages_of, question_of, same_answer, user_turn
from benchmarks.demo import smollm2
from benchmarks.demo.asking import ask, base_model, entries, marked, served, times
from benchmarks.demo.world import TASKS, examples
from benchmarks.real.model import cache_folder, model_folder
from benchmarks.server_process import ServerFailed
from inducekv_vllm.errors import InduceKVError
from selector.data.examples import read_task
from server.demo import BUNDLE, CHECKPOINT

MEMORY = "demo-memory"
SMOLLM2 = "smollm2"  # in place of a folder


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

    head = ("task", "question", "expected", "no memory", "with memory", "most used entries (weight)", "time, ms")
    columns = [Column(label, overflow="fold") for label in head]
    table = Table(*columns, title="The same frozen model, without and with its memory", show_lines=True)
    right = {base: 0, MEMORY: 0}
    for task, messages, text, answer in questions:
        plain = ask(client, base, messages, trace=False)
        memory = ask(client, MEMORY, messages, trace=True)
        assert memory.trace is not None, "a request that used memory and asked for its trace came back without one"
        for model, reply in ((base, plain), (MEMORY, memory)):
            right[model] += same_answer(reply.text, answer)
        replies = (marked(reply.text, answer) for reply in (plain, memory))
        table.add_row(task, escape(text), answer, *replies, entries(memory.trace), times(plain, memory))
    console.print(table)
    total = len(questions)
    console.print(f"right without memory: {right[base]} of {total}; with memory: {right[MEMORY]} of {total}")


def server_arguments(model: Path, bundle: Path) -> list[str]:
    # float32, as the checkpoint declares and its accuracy was measured; vLLM would choose bfloat16.
    precision = ["--dtype", "float32"]
    limits = ["--max-num-seqs", "4", "--kv-cache-memory-bytes", str(256 << 20)]  # plenty for one question at a time
    return [str(model), "--memory", f"{MEMORY}={bundle}", *precision, *limits]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add(
        "--model",
        type=Path,
        default=CHECKPOINT,
        metavar="DIR",
        help=f"or {SMOLLM2!r}, which `make setup-real` installs",
    )
    add("--bundle", type=Path, default=BUNDLE, help="of the demo model")
    add("--tasks", nargs="+", metavar="TASK", help="(default: all)")
    add("--questions", type=int, default=1, help="questions a task")
    args = parser.parse_args()
    real = str(args.model) == SMOLLM2
    known = ("base", *smollm2.TASKS) if real else TASKS
    tasks = args.tasks or known
    if unknown := [task for task in tasks if task not in known]:
        parser.error(f"--tasks must be of {', '.join(known)}, found {unknown[0]}")
    console = Console(width=None if sys.stdout.isatty() else 160)
    for path in () if real else (args.model, args.bundle):
        if not path.exists():
            parser.error(f"{path}: not found")
    try:
        if real:
            folder, model = cache_folder() / "demo-real", model_folder()
            bundle = smollm2.teach(folder, model, console)
            (warm_up,) = about_text(folder / "data", tasks[:1], "validation", 1)
            questions = list(about_text(folder / "data", tasks, "test", args.questions))
            more = list(smollm2.SERVING)
        else:
            model, bundle, more = args.model, args.bundle, []
            (warm_up,) = about_pictures(tasks[:1], "validation", 1)
            questions = list(about_pictures(tasks, "test", args.questions))
        with served(model, bundle, [*server_arguments(model, bundle), *more], console) as client:
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
