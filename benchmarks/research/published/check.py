"""What of a published suite is on disk: files, rows, ids, pictures; nothing is guessed.

    python -m benchmarks.research.published.check --suite ucit --data DIR [--images DIR] [--order NAME]

Prints a table in the order of learning and one JSON line. Ends with status 1 if something is missing.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.research.published.rows import pictures_of, read_rows
from benchmarks.research.published.suites import SUITES, PublishedSuite, Task, published_suite
from inducekv_vllm.errors import ConfigError, TaskDataError

IMAGE_ROOTS = ("datasets", "cl_dataset", "data", ".")  # below the data folder


@dataclass(frozen=True)
class Found:
    """Of one task's files."""

    task: str
    train: int  # rows
    train_pictures: int  # distinct
    repeated_ids: int  # training rows whose id an earlier one has, which is usual
    test: int
    test_pictures: int
    shared_pictures: int  # of training and test
    missing_pictures: int
    missing_files: tuple[str, ...]


def image_root(data: Path, images: Path | None) -> Path:
    return images or next((data / root for root in IMAGE_ROOTS if (data / root).is_dir()), data)


def rows_of(path: Path) -> Iterator[tuple[str, list[str]]]:
    """The id and the pictures of each row."""
    if path.suffix == ".csv":
        with path.open(encoding="utf-8", newline="") as file:
            yield from ((f"{row.get('video')}_{row.get('qid')}", []) for row in csv.DictReader(file))
        return
    for row in read_rows(path):
        yield str(row.get("id", row.get("question_id"))), pictures_of(row)


def count(rows: Iterable[tuple[str, list[str]]]) -> tuple[int, set[str], set[str]]:
    """Rows, distinct ids, distinct pictures."""
    number, ids, pictures = 0, set(), set()
    for name, of in rows:
        number += 1
        ids.add(name)
        pictures.update(of)
    return number, ids, pictures


def look_at(suite: PublishedSuite, task: Task, data: Path, images: Path) -> Found:
    files = suite.files(task, data)
    needed = {"/".join(names): names for names in (task.train, task.test, *[(name,) for name in task.others])}
    missing = tuple(shown for shown, names in needed.items() if not files.has(*names))
    nothing: tuple[int, set[str], set[str]] = (0, set(), set())
    train = count(rows_of(files.find(*task.train))) if files.has(*task.train) else nothing
    test = count(rows_of(files.find(*task.test))) if files.has(*task.test) else nothing
    gone = sum(not (images / picture).is_file() for picture in train[2] | test[2])
    return Found(
        *(task.name, train[0], len(train[2]), train[0] - len(train[1]), test[0], len(test[2])),
        *(len(train[2] & test[2]), gone, missing),
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--suite", required=True, choices=SUITES)
    add("--data", type=Path, required=True, metavar="DIR")
    add("--images", type=Path, metavar="DIR", help=f"(default: the first of {', '.join(IMAGE_ROOTS)} below DIR)")
    add("--order", help="one of the suite's other orders")
    options = parser.parse_args(arguments)
    try:
        suite = published_suite(options.suite)
        tasks = [suite.task(name) for name in suite.order(options.order)]
        images = image_root(options.data, options.images)
        found = [look_at(suite, task, options.data, images) for task in tasks]
    except (ConfigError, TaskDataError) as error:
        print(error, file=sys.stderr)
        return 2
    table = Table("task", "train", "pictures", "repeated ids", "test", "pictures", "of both", "missing")
    for each in found:
        gone = [f"{each.missing_pictures} pictures"] if each.missing_pictures else []
        lacks = ", ".join([*each.missing_files, *gone])
        numbers = (each.train, each.train_pictures, each.repeated_ids, each.test, each.test_pictures)
        numbers = (*numbers, each.shared_pictures)
        table.add_row(each.task, *(f"{number:,}" for number in numbers), lacks or "-")
    Console(width=120).print(table)
    lacking = sum(bool(each.missing_files) or each.missing_pictures > 0 for each in found)
    total = {"train": sum(each.train for each in found), "test": sum(each.test for each in found)}
    print(json.dumps({"suite": suite.name, **total, "lacking": lacking, "tasks": [asdict(each) for each in found]}))
    return 1 if lacking else 0


if __name__ == "__main__":
    sys.exit(main())
