"""`inducekv-bundle eval`: how many questions are answered right with a bundle and without, by task."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from rich.table import Table

from inducekv_vllm.bundle import Bundle, read_bundle
from inducekv_vllm.errors import ConfigError

from .asking import add_asked, base_model, check_asked, require_served, served_answers
from .columns import ColumnOptions, columns_of
from .flags import add_flags
from .gate_tables import print_table
from .loading import load_backbone

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
    check_asked(options)
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
    add_asked(added, "answer", "task data that was not learned, base questions, or both")
    added.add_argument("--max-tokens", type=int, default=MAX_TOKENS, help=f"of an answer (default {MAX_TOKENS})")
    add_flags(added, {"": ColumnOptions})
