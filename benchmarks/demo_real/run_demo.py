"""The demonstration behind `make demo-real`: SmolLM2 answers without memory, with PromptReplay, and with its memory.

Teaches the memory first, if that is not done (`benchmarks.demo_real.teaching`). Then starts `inducekv-serve` on a free
local port, asks questions that it has not seen, base questions among them, shows what came back and what the gate
decided, and stops the server.

    python -m benchmarks.demo_real.run_demo [--cache DIR] [--questions 3]
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import openai
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from benchmarks.chat import messages_of, same_answer
from benchmarks.continual.answering.plans import plan
from benchmarks.continual.methods import Artifact
from benchmarks.demo.asking import ask, base_model, gate_is_open, marked, served
from benchmarks.demo_real.teaching import Taught, teach
from benchmarks.real.model import cache_folder
from benchmarks.server_process import ServerFailed
from inducekv_vllm.errors import InduceKVError
from selector.data.examples import Example

MEMORY = "smollm2-memory"
HEAD = ("task", "question", "expected", "no memory", "PromptReplay", "with memory", "gate", "time, ms")
METHODS = HEAD[3:6]
LEGEND = """\
No question was taught. "base" are questions that the model answers well by itself.
PromptReplay shows the model the nearest taught questions and answers in its prompt, for every question.
The gate gives a question the memory of the task with the largest margin, if that is at least 0; else it is closed, and
the untouched model answers."""
VALIDATION = """\
A few questions say little: the last column has all validation questions of the task, right after it was learned. Its
gate was fitted to them too."""


def run(client: openai.OpenAI, taught: Taught, questions: int, console: Console) -> None:
    base = base_model(client, MEMORY)
    examples = [example for task in (*taught.suite.tasks, taught.suite.base) for example in task.test[:questions]]
    replayed = plan(taught.replay, taught.replay_state, taught.model).asks(examples)
    for model in (base, MEMORY):  # the first request of each kind warms up the server, which must not be in the table
        ask(client, model, messages_of(taught.suite.base.validation[0]), trace=False)

    columns = [Column(label, overflow="fold") for label in HEAD]
    table = Table(*columns, title="SmolLM2-135M-Instruct, frozen, without and with its memory", show_lines=True)
    right: Counter[tuple[str, str]] = Counter()
    for example, shown in zip(examples, replayed, strict=True):
        plain = ask(client, base, messages_of(example), trace=False)
        replay = ask(client, base, messages_of(shown.conversation), trace=False)
        memory = ask(client, MEMORY, messages_of(example), trace=True)
        assert memory.trace is not None, "a request that used memory and asked for its trace came back without one"
        replies = (plain, replay, memory)
        named = dict(zip(METHODS, replies, strict=True))
        right.update((example.task, name) for name, r in named.items() if same_answer(r.text, example.answer))
        texts = [marked(reply.text, example.answer) for reply in replies]
        seconds = "\n".join(f"{name} {1000 * r.seconds:.0f}" for name, r in named.items())
        verdict = verdict_of(memory.trace, same=plain.text == memory.text)
        table.add_row(example.task, escape(question_of(example)), example.answer, *texts, verdict, seconds)
    console.print(table)
    console.print(LEGEND)
    asked = Counter(example.task for example in examples)
    summary = Table("right answers", *METHODS, "with memory, validation")
    for task, count in asked.items():
        learned = taught.learned.get(task)
        validation = "" if learned is None else validation_of(learned)
        summary.add_row(task, *(f"{right[task, method]} of {count}" for method in METHODS), validation)
    console.print(summary)
    console.print(VALIDATION)


def validation_of(learned: Artifact) -> str:
    """The share of a task's validation questions that were right after it was learned."""
    return f"{learned.report['validation_accuracy']['deployed']:.0%} of {learned.report['pool']['validation_examples']}"


def question_of(example: Example) -> str:
    """The text of the last message."""
    return "\n".join(part["text"] for part in example.messages[-1]["content"])


def verdict_of(trace: dict[str, Any], same: bool) -> str:
    """Where the gate sent the request, and by how much: `same` says that the answer is the untouched model's."""
    margins = "\n".join(f"  {task} {margin:+.3f}" for task, margin in trace["gate"]["margins"].items())
    if gate_is_open(trace):
        return f"open: {trace['gate']['task']}\n{margins}"
    reason = trace["gate"]["closed"].replace("_", " ")
    return f"closed, {reason}{': the untouched answer' if same else ''}\n{margins}"


def server_arguments(model: Path, bundle: Path) -> list[str]:
    limits = ["--max-num-seqs", "4", "--max-model-len", "2048", "--kv-cache-memory-bytes", str(512 << 20)]
    # float32, in which the memory was taught; vLLM's CPU attention wants blocks of a multiple of 32 tokens.
    engine = ["--dtype", "float32", "--block-size", "32", "--enforce-eager"]
    return [str(model), "--memory", f"{MEMORY}={bundle}", *engine, *limits]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", type=Path, default=cache_folder(), help="of the model and its memory (%(default)s)")
    parser.add_argument("--questions", type=int, default=3, help="questions of each task, and base questions")
    options = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 160)
    try:
        taught = teach(options.cache, console=console)
        with served(taught.model, taught.bundle, server_arguments(taught.model, taught.bundle), console) as client:
            run(client, taught, options.questions, console)
    except (InduceKVError, ServerFailed) as error:
        console.print(f"[red]error:[/] {escape(str(error))}")
        return 1
    except KeyboardInterrupt:
        console.print("stopped")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
