"""From a table of questions to a taught model: memory by `selector.teach`, and a LoRA adapter by PEFT on the same rows.

    python -m benchmarks.from_a_table --model DIR [--task train.csv --questions test.csv ...]

The default table has 80 made-up support tickets and the teams that they go to, whose names no model knows; 24 others
are asked. A tenth of the rows is held out for validation. LoRA has rank 8 on all linear layers of the language model,
batches of 4 for 200 steps, and the best of three rates by its loss on the held-out rows. Base questions (`--base`),
which the model answers by itself, are asked afterwards; those of `--base-train` are given to the gate of one of the
memories. Prints the result as JSON in the last line.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import selector
from benchmarks.continual.answering.offline import OfflineAnswerer
from benchmarks.continual.methods import Artifact, RunContext
from benchmarks.continual.methods.lora import Lora
from benchmarks.continual.suites import TaskData
from benchmarks.machine import describe_machine
from selector.backbone.bundled_model import BundledModel
from selector.backbone.model import Backbone
from selector.backbone.scoring import Scorer
from selector.cli.settings import PRESETS
from selector.data.choice import hold_out
from selector.data.examples import Example, read_task
from selector.data.records import Columns
from selector.update.measures import memory_bytes

TABLES = Path(__file__).parents[1] / "docs" / "examples" / "support"
RESULTS = Path(__file__).parent / "results" / "from_a_table.json"
RATES = (3e-4, 1e-3, 3e-3)
MAX_TOKENS = 16


class BestLora(Lora):
    """By the validation loss of three rates."""

    def rates(self) -> Sequence[float]:
        return RATES


LORA = BestLora(steps=200, batch_size=4, precision="float32", rank=8)


def by_memory(preset: Mapping[str, Any]) -> Callable[[Path, Sequence[Example]], tuple[int, Callable[..., list[str]]]]:
    def learn(model: Path, rows: Sequence[Example]) -> tuple[int, Callable[..., list[str]]]:
        taught = selector.teach(model, rows, **preset)

        def answers(questions: Sequence[Example]) -> list[str]:
            return BundledModel(Scorer(Backbone.load(model)), taught.bundle).answers(questions, MAX_TOKENS)

        return memory_bytes(taught.bundle), answers

    return learn


def by_lora(model: Path, rows: Sequence[Example]) -> tuple[int, Callable[..., list[str]]]:
    training, validation = hold_out(rows, 0)
    task = TaskData(rows[0].task, tuple(training), tuple(validation))
    state = Path(tempfile.mkdtemp())
    artifact = LORA.learn(task, None, state, RunContext(model, 1, 0, 0, 1))
    prepared = OfflineAnswerer(model, MAX_TOKENS).prepare(artifact, state)
    return artifact.stored_bytes, prepared.answers


def untouched(model: Path, rows: Sequence[Example]) -> tuple[int, Callable[..., list[str]]]:
    return 0, OfflineAnswerer(model, MAX_TOKENS).prepare(Artifact("none", None, 0, {}), Path()).answers


METHODS = {
    "untouched": untouched,
    "memory": by_memory({}),
    "memory, --preset quick": by_memory(PRESETS["quick"]),
    "LoRA, rank 8": by_lora,
}


def right(answers: Sequence[str], questions: Sequence[Example]) -> int:
    return sum(said.strip() == each.answer.strip() for said, each in zip(answers, questions, strict=True))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--task", type=Path, default=TABLES / "train.csv")
    parser.add_argument("--questions", type=Path, default=TABLES / "test.csv")
    parser.add_argument("--base", type=Path, help="task data that the model answers well by itself")
    parser.add_argument("--base-train", type=Path, help="others like them, for the gate")
    parser.add_argument("--prompt-column", default="ticket")
    parser.add_argument("--answer-column", default="team")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    columns = Columns(options.prompt_column, options.answer_column, task="support")
    rows, questions = read_task(options.task, columns), read_task(options.questions, columns)
    base = read_task(options.base) if options.base else []
    found: dict[str, Any] = {}
    methods = {**METHODS}
    if options.base_train:
        methods["memory, with base questions"] = by_memory({"base": read_task(options.base_train)})
    for name, learn in methods.items():
        began = time.perf_counter()
        size, answers = learn(options.model, rows)
        seconds = round(time.perf_counter() - began, 1)
        found[name] = {"seconds": seconds, "bytes": size, "right": right(answers(questions), questions)}
        if base:
            found[name]["base_right"] = right(answers(base), base)
        print(f"{name}: {found[name]}", flush=True)
    counts = {"rows": len(rows), "questions": len(questions), "base": len(base)}
    result = {"benchmark": "from_a_table", "model": options.model.name, **counts, "methods": found}
    options.results.write_text(json.dumps({**result, "machine": describe_machine()}, indent=1) + "\n")
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
