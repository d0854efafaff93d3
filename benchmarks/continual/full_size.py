"""Made-up files of UCIT's published sizes: time and memory to count, to load and to select from them.

    python -m benchmarks.continual.full_size [--work DIR] [--only count load select]

213,857 training rows and 18,000 questions, each row's picture a link to one small file. Counting is
`benchmarks.published.check`, loading is what a stream does before it begins, with every row and every picture read.
Selecting is the paper's recipe with the demo model on 40,000 rows, the shortlist and two iterations; it is killed after
half of the extraction's shards, and goes on.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from benchmarks.continual.suites import load_suite
from benchmarks.machine import describe_machine
from benchmarks.published import check
from benchmarks.published.suites import UCIT
from selector.cli.select import WORSE, checkpoint_folder
from server.demo import CHECKPOINT

RESULTS = Path(__file__).parents[1] / "results" / "published_full_size.json"
QUESTIONS = 3000
# By task: training rows and distinct pictures, of a third-party audit of the published files; file names.
SIZES = {
    "ImageNet-R": (23_998, 23_998, "train.json"),
    "ArxivQA": (40_000, 30_534, "train_4w.json"),
    "VizWiz-Caption": (40_000, 20_559, "train.json"),
    "IconQA": (29_859, 29_859, "train.json"),
    "CLEVR-Math": (40_000, 30_489, "train_4w.json"),
    "Flickr30k": (40_000, 21_632, "train_brief_4w.json"),
}
ASKED = "What is the object in the image?\nAnswer the question using a single word or phrase."


def write(data: Path) -> None:
    """All files of the suite."""
    for task, (rows, pictures, train) in SIZES.items():
        folder, images = data / "instructions" / UCIT.task(task).folders[0], data / "datasets" / task
        folder.mkdir(parents=True)
        images.mkdir(parents=True)
        small = images / "one.png"  # of each task: a file may have 65,000 names
        Image.new("RGB", (16, 16), (30, 90, 200)).save(small)
        names = [f"{task}/{number:06d}.png" for number in range(pictures)]
        tests = [f"{task}/t{number:05d}.png" for number in range(QUESTIONS)]
        for name in (*names, *tests):
            os.link(small, data / "datasets" / name)
        turns = [{"from": "human", "value": f"<image>\n{ASKED}"}, {"from": "gpt", "value": "teapot"}]
        taught = [
            {"id": str(row % pictures), "image": names[row % pictures], "conversations": turns} for row in range(rows)
        ]
        asked = [
            {"question_id": str(row), "image": name, "text": ASKED, "answer": "teapot"}
            for row, name in enumerate(tests)
        ]
        (folder / train).write_text(json.dumps(taught))
        (folder / "test_3000.json").write_text(json.dumps(asked))
        if UCIT.task(task).others:
            captions = [{"image_id": row, "caption": f"a teapot {n}"} for row in range(QUESTIONS) for n in range(5)]
            references = {"images": [{"id": row} for row in range(QUESTIONS)], "annotations": captions}
            (folder / UCIT.task(task).others[0]).write_text(json.dumps(references))


def count(data: Path) -> None:
    check.main(["--suite", "ucit", "--data", str(data)])


def load(data: Path) -> None:
    suite = load_suite("ucit", data).in_order(["random:0"])
    print(sum(len(task.train) for task in suite.tasks), sum(len(task.test) for task in suite.tasks))


CANDIDATES, OUTPUT = 40_000, "full.safetensors"


def select(data: Path) -> None:
    """Writes the candidates if they are not there, and runs or resumes the selection."""
    task = data / "candidates.jsonl"
    if not task.exists():
        Image.new("RGB", (16, 16), (30, 90, 200)).save(data / "one.png")
        task.write_text("".join(json.dumps(candidate(row)) + "\n" for row in range(CANDIDATES)))
    options = ["--recipe", "paper", "--budget", "64", "--iterations", "2", "--beta", "0.1", "--gamma", "0.1"]
    main = [sys.executable, "-m", "selector.cli.select", "--model", str(CHECKPOINT), "--task", str(task)]
    os.execv(sys.executable, [*main, "--output", str(data / OUTPUT), *options])


def candidate(row: int) -> dict[str, Any]:
    asked = [
        {"type": "image_url", "image_url": {"url": "one.png"}},
        {"type": "text", "text": f"How many of the {row} are red?"},
    ]
    return {"id": str(row), "task": "full", "messages": [{"role": "user", "content": asked}], "answer": str(row % 10)}


STEPS: dict[str, Callable[[Path], None]] = {"count": count, "load": load, "select": select}


def measured(step: str, data: Path) -> dict[str, Any]:
    """In a process of its own."""
    command = [sys.executable, "-m", "benchmarks.continual.full_size", "--step", step, "--work", str(data)]
    began, found = time.perf_counter(), {}
    if step == "select":
        found = {"killed_after": killed_after_half(command, data)}
    # Made-up answers teach nothing.
    if subprocess.run(command, check=False).returncode not in (0, WORSE):
        raise SystemExit(f"{step} failed")
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss  # of the largest child so far
    return {"seconds": round(time.perf_counter() - began, 1), "peak_mib": round(peak / 1024), **found}


def killed_after_half(command: Sequence[str], data: Path) -> dict[str, Any]:
    """Begins a selection and kills it when half of its candidates' payloads are kept."""
    began, pool = time.perf_counter(), checkpoint_folder(data / OUTPUT) / "pool"
    process = subprocess.Popen(command)
    while (kept := begun_shard(pool)) < CANDIDATES // 2:
        if process.poll() is not None:
            raise SystemExit("the selection ended before it could be killed")
        time.sleep(0.2)
    process.kill()
    process.wait()
    return {"candidates": kept, "seconds": round(time.perf_counter() - began, 1)}


def begun_shard(pool: Path) -> int:
    """The first candidate of the last shard that is kept."""
    firsts = (path.stem.partition("-")[2] for path in pool.glob("retrieval_keys-*.safetensors"))
    return max((int(first) for first in firsts if first.isdigit()), default=0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, metavar="DIR", help="where the files go (default: a temporary folder)")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--only", nargs="+", choices=STEPS, default=list(STEPS))
    parser.add_argument("--step", choices=STEPS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.step:
        STEPS[options.step](options.work)
        return 0
    with tempfile.TemporaryDirectory(dir=options.work) as folder:
        if set(options.only) - {"select"}:
            write(Path(folder))
        found = {step: measured(step, Path(folder)) for step in options.only}
    result = {"benchmark": "published_full_size", "rows": sum(rows for rows, _, _ in SIZES.values()), **found}
    options.results.write_text(json.dumps({**result, "machine": describe_machine()}, indent=1) + "\n")
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
