"""Teach, ask, report."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from PIL import Image

import benchmarks.pictures as about
from benchmarks.chat import question_of, same_answer
from benchmarks.demo.world import BASE, examples
from benchmarks.pictures.files import KINDS, SENT, photographed
from benchmarks.record import keep, parser_of
from benchmarks.server_process import serving
from inducekv_vllm.errors import InduceKVError
from inducekv_vllm.vllm_seams.config import ADMIN_KEY_VARIABLE
from selector.api import teach
from selector.client import Message, Server, picture_part
from server.demo import CHECKPOINT

PROGRAM: Final = "python -m benchmarks.pictures"
KEY: Final = "a key of the benchmark"
ENVIRONMENT: Final = {"VLLM_CPU_KVCACHE_SPACE": "1", ADMIN_KEY_VARIABLE: KEY}
TASK: Final = "guild"
QUESTION: Final = "What is this called?"
TOKENS: Final = 8  # of an answer


def turn(data: bytes, question: str) -> list[Message]:
    return [{"role": "user", "content": [picture_part("image/png", data), {"type": "text", "text": question}]}]


def facts(server: Server, kind: str, count: int) -> Iterator[dict[str, Any]]:
    """A row for each way in which the pictures of a kind are sent."""
    known, others = ([KINDS[kind](seed) for seed in range(begin, begin + count)] for begin in (0, count))
    name = f"facts-{kind}"
    for number, data in enumerate(known):
        server.teach(name, [{"id": f"{number}", "messages": turn(data, QUESTION), "answer": f"number {number}"}])
    for sent, as_sent in SENT.items():
        found = [said(server, name, as_sent(data)) for data in known]
        yield {
            "pictures": kind,
            "sent as": sent,
            "taught": count,
            "right": sum(each == [f"{number}"] for number, each in enumerate(found)) / count,
            "wrong": sum(each not in ([], [f"{number}"]) for number, each in enumerate(found)) / count,
            "others": sum(said(server, name, as_sent(data)) != [] for data in others) / count,
        }
    server.unload(name)


def said(server: Server, name: str, data: bytes) -> list[str]:
    """The facts that a question about a picture is answered by."""
    trace = server.ask(name, turn(data, QUESTION), max_tokens=1, trace=True).trace
    return [] if trace is None else [fact["id"] for fact in trace["facts"]]


def written(folder: Path, task: str, split: str, count: int) -> Path:
    """Task data whose pictures are photographs of the demo world."""
    (folder / "images").mkdir(exist_ok=True)
    lines = []
    for record, pixels in examples(task, split, count):
        content = record["messages"][0]["content"][0]
        content["image_url"]["url"] = f"images/{task}-{split}-{len(lines)}.jpg"
        (folder / content["image_url"]["url"]).write_bytes(photographed(Image.fromarray(pixels), len(lines)))
        lines.append(json.dumps(record))
    path = folder / f"{task}-{split}.jsonl"
    path.write_text("\n".join(lines))
    return path


def trained(server: Server, folder: Path, sizes: Mapping[str, int]) -> Iterator[dict[str, Any]]:
    """A row for each way in which the questions' photographs are sent."""
    data = {split: written(folder, TASK, split, count) for split, count in sizes.items()}
    base = written(folder, BASE, "train", sizes["validation"])
    path = folder / f"{TASK}.safetensors"
    teach(CHECKPOINT, data["train"], validation=data["validation"], base=base, output=path, progress=True)
    server.load(TASK, path)
    asked = [json.loads(line) for line in data["test"].read_text().splitlines()]
    for sent, as_sent in SENT.items():
        right = opened = 0
        for record in asked:
            picture = (folder / record["messages"][0]["content"][0]["image_url"]["url"]).read_bytes()
            answer = server.ask(TASK, turn(as_sent(picture), question_of(record)), max_tokens=TOKENS, trace=True)
            right += same_answer(answer.text, record["answer"])
            opened += answer.trace is not None and answer.trace["gate"]["open"]
        yield {"task": TASK, "sent as": sent, "right": right / len(asked), "gate open": opened / len(asked)}


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """In Markdown."""
    head = list(rows[0])
    shown = [[f"{row[name]:.2f}" if isinstance(row[name], float) else f"{row[name]}" for name in head] for row in rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *shown))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = parser_of(about.__doc__)
    parser.add_argument("--facts", type=int, default=12, help="pictures of a kind that are taught (default: 12)")
    for split, count in (("train", 128), ("validation", 32), ("test", 64)):
        parser.add_argument(f"--{split}", type=int, default=count, help=f"photographs (default: {count})")
    options = parser.parse_args(arguments)
    try:
        run(options)
    except InduceKVError as error:
        print(f"{PROGRAM}: error: {error}", file=sys.stderr)
        return 2
    return 0


def run(options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        with serving(["--memory-root", place], folder / "log", ENVIRONMENT) as url:
            server = Server(url, admin_key=KEY)
            found = [row for kind in KINDS for row in facts(server, kind, options.facts)]
            print(table(found), flush=True)
            sizes = {split: getattr(options, split) for split in ("train", "validation", "test")}
            task = list(trained(server, folder, sizes))
    print(table(task))
    keep({"benchmark": "pictures", "facts": found, "task": task}, options.output)


if __name__ == "__main__":
    sys.exit(main())
