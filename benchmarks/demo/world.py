"""Writes the demo world as task data: `python -m benchmarks.demo.world --out DIR [--train N] [--test N] [--seed S]`.

One folder a task ("base" and every stream task), each with {train,validation,test}.jsonl and the pictures beside them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from PIL import Image

from benchmarks.data_folder import data_folder
from benchmarks.demo.questions import FAMILIES, ask
from benchmarks.demo.scenes import SPLITS, Scene, random_scene, render, stable_hash
from benchmarks.demo.streams import SEARCH_STREAMS, STREAMS, Digit, render_digit
from benchmarks.record import parser_of
from inducekv_vllm.errors import ConfigError

BASE = "base"
ALL_STREAMS = {**STREAMS, **SEARCH_STREAMS}
TASKS = (BASE, *STREAMS)  # without those of searches
SIZES = {"train": 512, "validation": 128, "test": 256}
SEED = 7


def draw(task: str, split: str, index: int, seed: int) -> tuple[Scene | Digit, str, str, str]:
    """Example `index` of a task's split: its picture's content, its question, answer and base family (or the task)."""
    rng = np.random.default_rng([seed, stable_hash(task), SPLITS.index(split), index])
    family = list(FAMILIES)[index % len(FAMILIES)]
    while True:
        if task == BASE:
            content: Scene | Digit = random_scene(rng, split)
            question = ask(rng, content, family)
        else:
            family = task
            content = ALL_STREAMS[task].draw(rng, split)
            question = ALL_STREAMS[task].ask(rng, content)
        if question is not None:
            return content, *question, family


def picture(content: Scene | Digit) -> np.ndarray:
    """`[48, 48, 3] uint8`."""
    return render_digit(content) if isinstance(content, Digit) else render(content)


def examples(task: str, split: str, number: int, seed: int = SEED) -> Iterator[tuple[dict, np.ndarray]]:
    """The first `number` examples of a task's split, no two with the same picture, as (record, picture)."""
    seen: set[bytes] = set()
    index = -1
    while len(seen) < number:
        index += 1
        if index > 50 * number + 1000:
            raise ValueError(f"task {task!r}: {split} has fewer than {number} different pictures")
        content, question, answer, family = draw(task, split, index, seed)
        pixels = picture(content)
        if pixels.tobytes() in seen:
            continue
        name = f"{split}_{len(seen):05d}"
        seen.add(pixels.tobytes())
        yield record_of(task, name, family, question, answer), pixels


def record_of(task: str, name: str, family: str, question: str, answer: str) -> dict:
    """One example about one picture, which is to be `images/NAME.png`."""
    parts = [{"type": "image_url", "image_url": {"url": f"images/{name}.png"}}, {"type": "text", "text": question}]
    return {
        "id": f"{task}/{name}",
        "task": task,
        "family": family,
        "messages": [{"role": "user", "content": parts}],
        "answer": answer,
    }


def write_task(directory: Path, task: str, sizes: dict[str, int], seed: int = SEED) -> None:
    """Writes one task's splits and pictures."""
    for split, number in sizes.items():
        write_split(directory, split, examples(task, split, number, seed))


def write_split(directory: Path, split: str, written: Iterable[tuple[dict, np.ndarray]]) -> None:
    """Writes examples (record, picture); the split's JSONL appears only once it and its pictures are complete."""
    (directory / "images").mkdir(parents=True, exist_ok=True)
    lines = []
    for record, pixels in written:
        Image.fromarray(pixels).save(directory / record["messages"][0]["content"][0]["image_url"]["url"])
        lines.append(json.dumps(record) + "\n")
    temporary = directory / f"{split}.jsonl.tmp"
    temporary.write_text("".join(lines))
    os.replace(temporary, directory / f"{split}.jsonl")


def main() -> None:
    parser = parser_of(__doc__, has_result=False)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tasks", nargs="+", choices=(BASE, *ALL_STREAMS), default=TASKS)
    for split, number in SIZES.items():
        parser.add_argument(f"--{split}", type=int, default=number)
    parser.add_argument("--seed", type=int, default=SEED)
    args = parser.parse_args()
    sizes = {split: getattr(args, split) for split in SPLITS}
    try:
        with data_folder(args.out, "demo", args.seed):
            for task in args.tasks:
                write_task(args.out / task, task, sizes, args.seed)
                print(f"{args.out / task}: " + ", ".join(f"{n} {split}" for split, n in sizes.items()))
    except ConfigError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
