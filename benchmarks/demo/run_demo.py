"""The demonstration behind `make demo`: the demo model answers questions about pictures, without and with its memory.

Starts `inducekv-serve` on a free local port, asks through the official `openai` client (the base model's name is the
untouched model, the bundle's name the same model with memory), prints what came back, and stops the server.

    python -m benchmarks.demo.run_demo [--model DIR] [--bundle FILE] [--tasks base guild ...] [--questions 2]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import openai
from rich.console import Console
from rich.table import Column, Table

from benchmarks.chat import question_of, same_answer, user_turn
from benchmarks.demo.asking import ask, base_model, entries, marked, served, times
from benchmarks.demo.world import TASKS, examples
from benchmarks.server_process import ServerFailed
from server.demo import BUNDLE, CHECKPOINT

MEMORY = "demo-memory"


def run(client: openai.OpenAI, tasks: list[str], questions: int, console: Console) -> None:
    base = base_model(client, MEMORY)
    # The first request of each kind warms up the server, which must not be in the table.
    record, pixels = next(examples(tasks[0], "validation", 1))
    for model in (base, MEMORY):
        ask(client, model, [user_turn(pixels, question_of(record))], trace=False)

    head = ("task", "question", "expected", "no memory", "with memory", "most used entries (weight)", "time, ms")
    columns = [Column(label, overflow="fold") for label in head]
    table = Table(*columns, title="The same frozen model, without and with its memory", show_lines=True)
    right = {base: 0, MEMORY: 0}
    total = 0
    for task in tasks:
        for record, pixels in examples(task, "test", questions):
            messages = [user_turn(pixels, question_of(record))]
            plain = ask(client, base, messages, trace=False)
            memory = ask(client, MEMORY, messages, trace=True)
            assert memory.trace is not None, "a request that used memory and asked for its trace came back without one"
            total += 1
            answer = record["answer"]
            for model, reply in ((base, plain), (MEMORY, memory)):
                right[model] += same_answer(reply.text, answer)
            replies = (marked(reply.text, answer) for reply in (plain, memory))
            table.add_row(task, question_of(record), answer, *replies, entries(memory.trace), times(plain, memory))
    console.print(table)
    console.print(f"right without memory: {right[base]} of {total}; with memory: {right[MEMORY]} of {total}")


def server_arguments(model: Path, bundle: Path) -> list[str]:
    # float32, as the checkpoint declares and its accuracy was measured; vLLM would choose bfloat16.
    precision = ["--dtype", "float32"]
    limits = ["--max-num-seqs", "4", "--kv-cache-memory-bytes", str(256 << 20)]  # plenty for one question at a time
    return [str(model), "--memory", f"{MEMORY}={bundle}", *precision, *limits]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=CHECKPOINT)
    parser.add_argument("--bundle", type=Path, default=BUNDLE)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=TASKS, metavar="TASK")
    parser.add_argument("--questions", type=int, default=1, help="questions a task")
    args = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 160)
    for path in (args.model, args.bundle):
        if not path.exists():
            parser.error(f"{path}: not found")
    try:
        with served(args.model, args.bundle, server_arguments(args.model, args.bundle), console) as client:
            run(client, list(args.tasks), args.questions, console)
    except ServerFailed as error:
        console.print(f"[red]error:[/] {error}", markup=True)
        return 1
    except KeyboardInterrupt:
        console.print("stopped")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
