"""The commands of `inducekv-bundle` for what a bundle keeps, who made it, and what a server did with it."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from inducekv_vllm.bundle import Bundle, read_bundle, read_private_key, sign_digest, write_bundle
from inducekv_vllm.errors import ConfigError
from inducekv_vllm.files import audit_chain

from ..runtime.files import require_output
from .flags import Parser
from .gate_questions import BACKGROUND, NEAR_MISSES, read_others_of
from .gate_tables import print_fitted
from .loading import load_backbone

if TYPE_CHECKING:
    from ..gate.fit import FittedGate
    from ..update.forget import Forgotten

SUCCESS: Final = 0
Command = Callable[[argparse.Namespace], int]


def forget(options: argparse.Namespace) -> int:
    """Write the next version of a bundle without some of its entries."""
    from ..update.forget import Forgotten, rows_to_forget, without_entries

    _check_forget(options)
    forgotten = Forgotten(ids=options.entry, source_digests=options.source_digest, tasks=options.forget_task)
    bundle = read_bundle(options.path)
    rows = rows_to_forget(bundle, forgotten, str(options.path))
    fitted = _refitted(options, bundle, rows, forgotten) if options.model else None
    after = without_entries(bundle, rows, None if fitted is None else fitted.gate, forgotten)
    write_bundle(after, options.output)
    gone = ", ".join(task for task in bundle.metadata.tasks if task not in after.metadata.tasks) or "none"
    print(
        f"{options.output}: {after.num_entries} entries, {len(rows)} forgotten, tasks gone: {gone}, {_facts(after)}"
        f"digest {after.digest}"
    )
    if fitted is not None:
        print_fitted(fitted)
    return SUCCESS


def _facts(bundle: Bundle) -> str:
    return f"{len(bundle.metadata.facts)} facts left, " if bundle.metadata.facts else ""


def _check_forget(options: argparse.Namespace) -> None:
    if not (options.entry or options.source_digest or options.forget_task):
        raise ConfigError("say what to forget: --entry, --source-digest or --task")
    if bool(options.model) != bool(options.anchors) or (_of_a_fit(options) and not options.model):
        raise ConfigError(
            "to fit the gate again, give --model and --anchors, and --base, --background and --not if it had such "
            "questions"
        )
    require_output(options.output, options.path, options.base, options.background, options.near_misses)


def _of_a_fit(options: argparse.Namespace) -> bool:
    return any((options.base, options.background, options.near_misses))


def _refitted(options: argparse.Namespace, bundle: Bundle, rows: list[int], forgotten: Forgotten) -> FittedGate | None:
    from ..data.anchors import AnchorStore
    from ..update.forget import refitted_gate

    anchors, others = (
        AnchorStore(options.anchors).read(),
        read_others_of(options),
    )  # before the model, which takes longer
    return refitted_gate(load_backbone(options.model), bundle, rows, anchors, others, forgotten, progress=True)


def sign(options: argparse.Namespace) -> int:
    """Sign a bundle with an Ed25519 private key; its digest stays the same."""
    key = read_private_key(options.key)
    bundle = read_bundle(options.path)
    signature = sign_digest(bundle.digest, key)
    output = options.output or Path(options.path)
    require_output(output)
    write_bundle(replace(bundle, signature=signature), output)
    print(f"{output}: signed by the key {signature.key}, digest {bundle.digest}")
    return SUCCESS


def audit_verify(options: argparse.Namespace) -> int:
    """Check the audit chain of a server from its first record to its last, and print its head.

    Exit status 2: a record is broken.
    """
    records, head = audit_chain.verify(options.path, options.head)
    print(f"{options.path}: {records} records, head {head}")
    return SUCCESS


def audit_show(options: argparse.Namespace) -> int:
    """Print the audit chain of a server, a JSON object a line."""
    for _, record in audit_chain.read(options.path):
        print(record)
    return SUCCESS


def add_commands(
    command: Callable[[str, Command], argparse.ArgumentParser],
    parser: argparse._SubParsersAction[Parser],
) -> None:
    """Add these commands to the parser of `inducekv-bundle`."""
    added = command("forget", forget)
    added.add_argument("path", metavar="PATH", type=Path, help="a bundle file; it is not changed")
    for flag, dest, metavar, text in FORGET_FLAGS:
        added.add_argument(flag, dest=dest, action="append", default=[], metavar=metavar, help=f"{text}; repeatable")
    added.add_argument("--model", help="fit the gate again, with this model")
    added.add_argument("--anchors", type=Path, metavar="DIR", help="with --model: the anchor store of the stream")
    added.add_argument("--base", type=Path, help="with --model: the questions that the model answers well by itself")
    added.add_argument("--background", type=Path, metavar="FILE", help=f"with --model: {BACKGROUND}")
    text = f"with --model: {NEAR_MISSES}"
    added.add_argument("--not", dest="near_misses", type=Path, metavar="FILE", help=text)
    added.add_argument("--output", type=Path, required=True, help="the bundle file to write, replaced if it exists")

    added = command("sign", sign)
    added.add_argument("path", metavar="PATH", help="a bundle file")
    added.add_argument("--key", required=True, metavar="FILE", help="an Ed25519 private key in PEM")
    added.add_argument("--output", type=Path, help="where to write the signed bundle (default: in place)")

    audit = parser.add_parser("audit", help="Work with the audit chain of a server.").add_subparsers(required=True)
    for name, run in (("show", audit_show), ("verify", audit_verify)):
        verify = audit.add_parser(name, help=run.__doc__, description=run.__doc__)
        verify.add_argument("path", metavar="FILE", help="what the server was given as --memory-state")
        verify.set_defaults(run=run)
    verify.add_argument("--head", metavar="SHA256", help="the head of an earlier check, which must be in the chain")


FORGET_FLAGS: Final = (
    ("--entry", "entry", "ID", "the entry of this id"),
    ("--source-digest", "source_digest", "D", "entries that were made from the example of this digest"),
    ("--task", "forget_task", "TASK", "all entries of this task"),
)
