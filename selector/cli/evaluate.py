"""`inducekv-bundle eval`: how many questions are answered right with a bundle and without, by task."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from rich.table import Table

from inducekv_vllm.bundle import Bundle, read_bundle
from inducekv_vllm.errors import ConfigError

from .asking import base_model, require_served, served_answers
from .columns import ColumnOptions, columns_of
from .flags import add_flags
from .gate_tables import print_table
from .loading import load_backbone
from .publishing import require_address

if TYPE_CHECKING:
    from ..data.examples import Example
    from ..update.accuracy import Accuracy

SUCCESS: Final = 0
MAX_TOKENS: Final = 64
Command = Callable[[argparse.Namespace], int]


def evaluate(options: argparse.Namespace) -> int:
    """Print how many questions of each task are answered right with the bundle and without: word for word, but for
    white space at the ends. Answered here with --model, or by a running server with --url.
    """
    if options.url:
        require_address(options.url, "--url")
    elif options.name:
        raise ConfigError("--name is what the bundle is called at a server: give its --url")
    if options.max_tokens < 1:
        raise ConfigError(f"--max-tokens must be at least 1, found {options.max_tokens}")

    from ..data.examples import read_task

    bundle = read_bundle(options.path)
    columns = columns_of(options)
    examples = [example for path in options.questions for example in read_task(path, columns)]
    _print((_by_server if options.url else _by_model)(options, bundle, examples))
    return SUCCESS


def _by_model(options: argparse.Namespace, bundle: Bundle, examples: Sequence[Example]) -> list[Accuracy]:
    from ..update.accuracy import accuracies_of

    return accuracies_of(load_backbone(options.model, options.device), bundle, examples, options.max_tokens)


def _by_server(options: argparse.Namespace, bundle: Bundle, examples: Sequence[Example]) -> list[Accuracy]:
    from ..update.accuracy import accuracies

    name = options.name or options.path.stem
    require_served(options.url, name, bundle.digest)
    models = (base_model(options.url, name), name)
    answers = [served_answers(options.url, model, examples, options.max_tokens) for model in models]
    return accuracies(examples, *answers)


def _print(rows: Sequence[Accuracy]) -> None:
    table = Table("task", "questions", "right without memory", "right with it", box=None)
    for row in rows:
        shares = [f"{count} ({count / row.questions:.1%})" for count in (row.without, row.with_memory)]
        table.add_row(row.task, str(row.questions), *shares)
    print_table(table)


def add_command(command: Callable[[str, Command], argparse.ArgumentParser]) -> None:
    """Add this command to the parser of `inducekv-bundle`."""
    added = command("eval", evaluate)
    added.add_argument("path", metavar="BUNDLE", type=Path, help="a bundle file")
    added.add_argument(
        "--questions",
        type=Path,
        action="append",
        required=True,
        metavar="FILE",
        help="task data that was not learned, base questions, or both; repeatable",
    )
    decider = added.add_mutually_exclusive_group(required=True)
    decider.add_argument("--model", help="answer here, with this model folder or Hugging Face id")
    decider.add_argument("--url", help="ask the server at this address, which has the bundle")
    added.add_argument("--name", help="with --url: the bundle's name there (default: the file's without its ending)")
    added.add_argument("--max-tokens", type=int, default=MAX_TOKENS, help=f"of an answer (default {MAX_TOKENS})")
    added.add_argument("--device", default="cpu", help="with --model: torch device (default cpu)")
    add_flags(added, {"": ColumnOptions})
