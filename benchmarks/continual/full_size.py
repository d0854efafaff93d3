"""Made-up files of UCIT's published sizes: how long they take to be counted and loaded, and how much memory.

    python -m benchmarks.continual.full_size [--work DIR]

213,857 training rows and 18,000 questions, each row's picture a link to one small file. Counting is
`benchmarks.published.check`, loading is what a stream does before it begins, with every row and every picture read.
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
from collections.abc import Callable
from pathlib import Path
from typing import Any

from PIL import Image

from benchmarks.continual.suites import load_suite
from benchmarks.machine import describe_machine
from benchmarks.published import check
from benchmarks.published.suites import UCIT

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


STEPS: dict[str, Callable[[Path], None]] = {"count": count, "load": load}


def measured(step: str, data: Path) -> dict[str, Any]:
    """In a process of its own."""
    began = time.perf_counter()
    subprocess.run(
        [sys.executable, "-m", "benchmarks.continual.full_size", "--step", step, "--work", str(data)], check=True
    )
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss  # of the largest child so far
    return {"seconds": round(time.perf_counter() - began, 1), "peak_mib": round(peak / 1024)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, metavar="DIR", help="where the files go (default: a temporary folder)")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--step", choices=STEPS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.step:
        STEPS[options.step](options.work)
        return 0
    with tempfile.TemporaryDirectory(dir=options.work) as folder:
        write(Path(folder))
        found = {step: measured(step, Path(folder)) for step in STEPS}
    result = {"benchmark": "published_full_size", "rows": sum(rows for rows, _, _ in SIZES.values()), **found}
    options.results.write_text(json.dumps({**result, "machine": describe_machine()}, indent=1) + "\n")
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
