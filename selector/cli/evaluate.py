"""`inducekv-bundle eval`: by task, how many questions are answered right with a bundle and without, and its gate; and
which questions its facts have missed.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from rich.table import Table

from inducekv_vllm.bundle import Bundle, Gate, read_bundle
from inducekv_vllm.errors import ConfigError
from inducekv_vllm.facts import FactFound

from ..client import Server
from .asking import Decided, add_asked, check_asked, facts_in, require_served, served_answers, served_decisions
from .columns import ColumnOptions, columns_of
from .eval_gate import Asked, Outcomes, decided, outcomes, print_nearest
from .flags import add_flags
from .gate_tables import print_table
from .loading import load_backbone
from .missed import misses, print_misses

if TYPE_CHECKING:
    from ..data.examples import Example
    from ..update.accuracy import Accuracy

SUCCESS: Final = 0
MAX_TOKENS: Final = 64
SHOWN: Final = 20  # misses
Command = Callable[[argparse.Namespace], int]


@dataclass(frozen=True)
class _Answered:
    """What a bundle made of n questions."""

    rows: list[Accuracy]
    decisions: Sequence[Decided]  # [n] of the gate; empty without one
    facts: list[str | None]  # [n], the ids of those that were found; empty if the bundle has none


def evaluate(options: argparse.Namespace) -> int:
    """Print how many questions of each task are answered right with the bundle and without (word for word, but for
    white space at the ends), and where its gate sends them. Answered here with --model, or by a running server with
    --url. Then the questions that a fact has the answer to and did not answer, or another one did: what keeps them
    apart, and the wording to add.
    """
    check_asked(options)
    for flag, value, least in (("--max-tokens", options.max_tokens, 1), ("--misses", options.misses, 0)):
        if value < least:
            raise ConfigError(f"{flag} must be at least {least}, found {value}")

    from ..data.examples import read_task

    bundle = read_bundle(options.path)
    columns = columns_of(options)
    examples = [example for path in options.questions for example in read_task(path, columns)]
    answered = (_by_server if options.url else _by_model)(options, bundle, examples)
    asked = [] if bundle.gate is None else _asked(bundle.gate, examples)
    _print(answered.rows, {row.kind: row for row in outcomes(asked, answered.decisions)})
    print_nearest(asked, answered.decisions)
    if answered.facts:
        print_misses(misses(bundle.metadata, examples, answered.facts), options.misses)
    return SUCCESS


def _by_model(options: argparse.Namespace, bundle: Bundle, examples: Sequence[Example]) -> _Answered:
    from ..backbone.bundled_model import BundledModel
    from ..backbone.scoring import Scorer
    from ..update.accuracy import accuracies

    backbone = load_backbone(options.model, options.device)
    bundle.require_backbone(backbone.fingerprint, str(options.path))
    scorer = Scorer(backbone)
    with_memory, without = BundledModel(scorer, bundle), BundledModel(scorer, None)
    rows = accuracies(
        examples, *(each.answers(examples, options.max_tokens, progress=True) for each in (without, with_memory))
    )
    # What the gate has seen for the answers is what it is shown with.
    decisions = [] if bundle.gate is None else decided(bundle.gate, with_memory.evidence(examples))
    found = with_memory.facts_of(examples)
    facts = [bundle.metadata.facts[each.number].id if isinstance(each, FactFound) else None for each in found]
    return _Answered(rows, decisions, facts)


def _by_server(options: argparse.Namespace, bundle: Bundle, examples: Sequence[Example]) -> _Answered:
    from ..update.accuracy import accuracies

    name = options.name or options.path.stem
    require_served(options.url, name, bundle.digest)
    base, has_facts = Server.from_environment(options.url).base_model(name), bool(bundle.metadata.facts)
    without = served_answers(options.url, base, examples, options.max_tokens)
    with_memory = served_answers(options.url, name, examples, options.max_tokens, trace=has_facts)
    rows = accuracies(examples, *([answer.text for answer in answers] for answers in (without, with_memory)))
    decisions = [] if bundle.gate is None else served_decisions(options.url, name, examples)
    return _Answered(rows, decisions, facts_in(with_memory, options.url) if has_facts else [])


def _asked(gate: Gate, examples: Sequence[Example]) -> list[Asked]:
    return [Asked(each, each.task if each.task in gate.tasks else None, each.task) for each in examples]


def _print(rows: Sequence[Accuracy], gate: Mapping[str, Outcomes]) -> None:
    head = ("task", "questions", "right without memory", "right with it")
    table = Table(*head, *(("to its task", "to another", "gate closed") if gate else ()), box=None)
    for row in rows:
        cells = [f"{count} ({count / row.questions:.1%})" for count in (row.without, row.with_memory)]
        if found := gate.get(row.task):
            another = found.wrong if found.task is not None else found.opened
            cells += [str(found.routed) if found.task is not None else "-", str(another)]
            cells.append(str(found.questions - found.opened))
        table.add_row(row.task, str(row.questions), *cells)
    print_table(table)


def add_command(command: Callable[[str, Command], argparse.ArgumentParser]) -> None:
    """Add this command to the parser of `inducekv-bundle`."""
    added = command("eval", evaluate)
    add_asked(added, "answer", "task data that was not learned, base questions, or both")
    added.add_argument("--max-tokens", type=int, default=MAX_TOKENS, help=f"of an answer (default {MAX_TOKENS})")
    added.add_argument(
        "--misses", type=int, default=SHOWN, help=f"questions shown that a fact should have answered (default {SHOWN})"
    )
    add_flags(added, {"": ColumnOptions})
