"""`inducekv-bundle teach`: the next version of a bundle with more facts; nothing is trained."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from inducekv_vllm.bundle import FactRecord, PictureRecord, read_bundle, write_bundle
from inducekv_vllm.errors import ConfigError, TaskDataError

from ..runtime.files import require_output
from .columns import ColumnOptions, columns_of
from .common import SUCCESS, add_output
from .flags import add_flags

if TYPE_CHECKING:
    from inducekv_vllm.teaching import Report

    from ..data.examples import Example


def run(options: argparse.Namespace) -> int:
    """Write the next version of a bundle, or a first one of facts alone: questions with answers, from task data."""
    if options.budget_bytes is not None and options.budget_bytes < 1:
        raise ConfigError(f"--budget-bytes must be at least 1, found {options.budget_bytes}")
    require_output(options.output, *options.task)

    from inducekv_vllm.backbone.fact_reader import FactReader
    from inducekv_vllm.teaching import taught

    from ..data.examples import read_task

    columns = columns_of(options)
    facts = _facts([example for path in options.task for example in read_task(path, columns)])
    reader = FactReader.of(options.model)
    before = None if options.bundle is None else read_bundle(options.bundle, backbone=reader.model)
    made = taught(before, facts, reader, options.budget_bytes)
    write_bundle(made.bundle, options.output)
    _print(made.report)
    print(f"{options.output}: {len(made.bundle.metadata.facts)} facts, digest {made.bundle.digest}")
    return SUCCESS


def _print(report: Report) -> None:
    for what, ids in (
        ("corrected", report.corrected),
        ("forgotten, to make room", report.dropped),
        ("its question is answered by a newer fact", report.replaced),
    ):
        for id in ids:
            print(f"{id}: {what}")


def _facts(examples: Sequence[Example]) -> list[FactRecord]:
    """Raises TaskDataError: an example is a conversation."""
    from ..update.facts import fact_of_example

    facts = []
    for example in examples:
        picture = PictureRecord.of(example.load_images()) if example.images else None
        if (fact := fact_of_example(example, example.id, picture)) is None:
            raise TaskDataError(f"example {example.id!r}: expected one question, found a conversation")
        facts.append(fact)
    return facts


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", required=True, help="model folder or Hugging Face id")
    parser.add_argument("--bundle", type=Path, help="the version before (default: none, a bundle of facts alone)")
    parser.add_argument(
        "--task",
        type=Path,
        action="append",
        required=True,
        metavar="FILE",
        help="task data: each example is a fact, with its pictures; an id that the bundle has is corrected; repeatable",
    )
    text = (
        "of tensors and facts; beyond it those taught longest ago are forgotten (default: as before, at first 64 MiB)"
    )
    parser.add_argument("--budget-bytes", type=int, help=text)
    add_flags(parser, {"": ColumnOptions})
    add_output(parser)
