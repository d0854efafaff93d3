"""`inducekv-bundle eval`: by task, how many questions are answered right with a bundle and without, and its gate; and
which questions its facts have missed.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from rich.table import Table

from inducekv_vllm.bundle import Bundle, Gate, read_bundle
from inducekv_vllm.errors import BundleError
from inducekv_vllm.facts import FactFound

from ..client import Server
from .asking import Decided, decisions_in, facts_in, served_answers, served_decisions, served_name
from .columns import ColumnOptions, columns_of
from .common import SUCCESS, add_bundle, print_table
from .flags import add_flags
from .gate_decisions import Asked, Outcomes, decided, outcomes, print_outcomes, read_asked
from .loading import load_backbone
from .missed import misses, print_misses
from .publish import require_address

if TYPE_CHECKING:
    from ..backbone.model import Backbone
    from ..data.examples import Example
    from ..update.accuracy import Accuracy

SHOWN: Final = 20  # misses
BEYOND: Final = 16  # tokens of an answer, after as many as the longest right one has bytes


@dataclass(frozen=True)
class _Answered:
    """What a bundle made of n questions."""

    rows: list[Accuracy]
    decisions: Sequence[Decided]  # [n] of the gate; empty without one
    facts: list[str | None]  # [n], the ids of those that were found; empty if the bundle has none


def run(options: argparse.Namespace) -> int:
    """Print how many questions of each task are answered right with the bundle and without (word for word, but for
    white space at the ends), and where its gate sends them. Answered here with --model, or by a running server with
    --url. Then the questions that a fact has the answer to and did not answer, or another one did: what keeps them
    apart, and the wording to add.

    With --gate, only what the gate decides: by task and file, without answers. A .txt file has a request of no task on
    each line.
    """
    if options.url:
        require_address(options.url, "--url")
    bundle = read_bundle(options.path)
    if options.gate:
        _show_gate(options, bundle)
    else:
        _show_answers(options, bundle)
    return SUCCESS


def _show_answers(options: argparse.Namespace, bundle: Bundle) -> None:
    from ..data.examples import read_task

    columns = columns_of(options)
    examples = [example for path in options.questions for example in read_task(path, columns)]
    answered = (_by_server if options.url else _by_model)(options, bundle, examples)
    asked = [] if bundle.gate is None else _asked(bundle.gate, examples)
    _print(answered.rows, {row.kind: row for row in outcomes(asked, answered.decisions)})
    if answered.facts:
        print_misses(misses(bundle.metadata, examples, answered.facts), SHOWN)


def _show_gate(options: argparse.Namespace, bundle: Bundle) -> None:
    if (gate := bundle.gate) is None:
        raise BundleError(f"{options.path}: the bundle has no relevance gate")
    asked = [question for path in options.questions for question in read_asked(path, gate)]
    examples = [question.example for question in asked]
    if options.url:
        name = served_name(options.url, options.path.stem, bundle.digest)
        decisions = served_decisions(options.url, name, examples)
    else:
        from ..backbone.token_values import evidence_of

        decisions = decided(gate, evidence_of(_backbone(options, bundle), gate, examples))
    print_outcomes(outcomes(asked, decisions))


def _backbone(options: argparse.Namespace, bundle: Bundle) -> Backbone:
    backbone = load_backbone(options.model)
    bundle.require_backbone(backbone.fingerprint, str(options.path))
    return backbone


def _max_tokens(examples: Sequence[Example]) -> int:
    """More than any right answer has: no token is shorter than a byte."""
    return max(len(example.answer.encode()) for example in examples) + BEYOND


def _by_model(options: argparse.Namespace, bundle: Bundle, examples: Sequence[Example]) -> _Answered:
    from ..backbone.bundled_model import BundledModel
    from ..backbone.judging import BackboneJudge
    from ..backbone.scoring import Scorer
    from ..update.accuracy import accuracies

    scorer, max_tokens = Scorer(_backbone(options, bundle)), _max_tokens(examples)
    judge = BackboneJudge(scorer.backbone)
    with_memory, without = BundledModel(scorer, bundle, judge), BundledModel(scorer, None)
    rows = accuracies(examples, *(each.answers(examples, max_tokens, progress=True) for each in (without, with_memory)))
    # What the gate has seen for the answers is what it is shown with.
    decisions = [] if bundle.gate is None else decided(bundle.gate, with_memory.evidence(examples))
    found = with_memory.facts_of(examples)
    facts = [bundle.metadata.facts[each.number].id if isinstance(each, FactFound) else None for each in found]
    return _Answered(rows, decisions, facts)


def _by_server(options: argparse.Namespace, bundle: Bundle, examples: Sequence[Example]) -> _Answered:
    from ..update.accuracy import accuracies

    name, max_tokens = served_name(options.url, options.path.stem, bundle.digest), _max_tokens(examples)
    base, has_facts = Server.from_environment(options.url).base_model(name), bool(bundle.metadata.facts)
    without = served_answers(options.url, base, examples, max_tokens)
    with_memory = served_answers(options.url, name, examples, max_tokens, trace=has_facts or bundle.gate is not None)
    rows = accuracies(examples, *([answer.text for answer in answers] for answers in (without, with_memory)))
    decisions = [] if bundle.gate is None else decisions_in(with_memory, options.url)
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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_bundle(parser)
    text = "task data that was not learned, base questions, or both; repeatable"
    parser.add_argument("--questions", type=Path, action="append", required=True, metavar="FILE", help=text)
    asked = parser.add_mutually_exclusive_group(required=True)
    asked.add_argument("--model", help="answer here, with this model folder or Hugging Face id")
    asked.add_argument("--url", help="ask the server at this address, which has the bundle")
    parser.add_argument("--gate", action="store_true", help="answer nothing, and print only what the gate decides")
    add_flags(parser, {"": ColumnOptions})
