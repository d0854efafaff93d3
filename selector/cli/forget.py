"""`inducekv-bundle forget`: the next version of a bundle without some of its entries and facts."""

import argparse
from typing import Final

from inducekv_vllm.bundle import read_bundle, write_bundle
from inducekv_vllm.errors import ConfigError

from ..runtime.files import require_output
from ..update.forget import Forgotten, rows_to_forget, without_entries
from .common import SUCCESS, add_bundle, add_output

NAMED: Final = (
    ("--entry", "ID", "the entry or fact of this id"),
    ("--task", "TASK", "all of this task"),
)


def run(options: argparse.Namespace) -> int:
    """Write the next version of a bundle without some of its entries and facts. The others stay, bit for bit.

    Where a task is gone, `gate-fit` fits the gate to those that are left.
    """
    if not (options.entry or options.task):
        raise ConfigError("say what to forget: --entry or --task")
    require_output(options.output, options.path)
    forgotten = Forgotten(ids=options.entry, tasks=options.task)
    bundle = read_bundle(options.path)
    rows = rows_to_forget(bundle, forgotten, str(options.path))
    after = without_entries(bundle, rows, forgotten)
    write_bundle(after, options.output)
    gone = ", ".join(task for task in bundle.metadata.tasks if task not in after.metadata.tasks) or "none"
    facts = f"{len(after.metadata.facts)} facts left, " if after.metadata.facts else ""
    print(
        f"{options.output}: {after.num_entries} entries, {len(rows)} forgotten, tasks gone: {gone}, {facts}"
        f"digest {after.digest}"
    )
    return SUCCESS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_bundle(parser)
    for flag, metavar, text in NAMED:
        parser.add_argument(flag, action="append", default=[], metavar=metavar, help=f"{text}; repeatable")
    add_output(parser)
