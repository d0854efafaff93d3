"""`inducekv-bundle teach`: the next version of a bundle with more facts, or without some; nothing is trained."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from inducekv_vllm.bundle import Bundle, FactRecord, read_bundle, write_bundle
from inducekv_vllm.errors import ConfigError, TaskDataError
from inducekv_vllm.facts import STRICTNESS

from ..runtime.files import require_output
from .columns import ColumnOptions, columns_of
from .common import SUCCESS, add_output
from .flags import add_flags
from .loading import load_backbone

if TYPE_CHECKING:
    from ..data.examples import Example


def run(options: argparse.Namespace) -> int:
    """Write the next version of a bundle, or a first one of facts alone: questions with answers, from task data."""
    if not options.task and not options.forget and options.strictness is None:
        raise ConfigError("say what to teach, to forget or to change: --task, --forget or --strictness")
    if options.forget and options.bundle is None:
        raise ConfigError("--forget needs the --bundle that has the facts")
    if not options.task and options.bundle is None:
        raise ConfigError("--strictness needs --task, or the --bundle that has the facts")
    if options.budget_bytes is not None and options.budget_bytes < 1:
        raise ConfigError(f"--budget-bytes must be at least 1, found {options.budget_bytes}")
    require_output(options.output, *options.task)

    from inducekv_vllm.backbone.stored_facts import FactReader
    from inducekv_vllm.teaching import dropped, forgotten, replaced_by, taught

    from ..data.examples import read_task

    columns = columns_of(options)
    facts = _facts([example for path in options.task for example in read_task(path, columns)], options.model)
    reader = FactReader.of(options.model)
    bundle: Bundle | None = None
    if options.bundle is not None:
        bundle = read_bundle(options.bundle, backbone=reader.model)
    if options.forget and bundle is not None:
        bundle = forgotten(bundle, options.forget)
    if facts or options.strictness is not None:
        before = bundle
        more = {"when_full": options.when_full, "strictness": options.strictness}
        bundle = taught(bundle, facts, reader, options.budget_bytes, **more)
        for gone in dropped(before, bundle):
            print(f"{gone}: forgotten, to make room")
        for fact in _corrected(before, facts):
            print(f"{fact.id}: corrected, it was {fact.question!r:.100}")
    assert bundle is not None
    write_bundle(bundle, options.output)
    for old, new in replaced_by(bundle.metadata.facts).items():
        print(f"{old}: its question is answered by the newer {new}")
    print(f"{options.output}: {len(bundle.metadata.facts)} facts, digest {bundle.digest}")
    return SUCCESS


def _corrected(before: Bundle | None, facts: Sequence[FactRecord]) -> list[FactRecord]:
    """The earlier facts in whose place others are, which ask or answer something else."""
    new = {fact.id: (fact.question, fact.answer) for fact in facts}
    earlier = before.metadata.facts if before is not None else ()
    return [old for old in earlier if new.get(old.id) not in (None, (old.question, old.answer))]


def _facts(examples: Sequence[Example], model: str) -> list[FactRecord]:
    """The model is loaded if some examples have pictures.

    Raises:
        TaskDataError: an example is a conversation.
        UnsupportedModel: the model takes no pictures, or they cannot be told from each other with it.
    """
    from ..update.facts import fact_of_example

    pictures = _pictures([each for each in examples if each.images], model)
    facts = []
    for example in examples:
        if (fact := fact_of_example(example, example.id, pictures.get(example.id))) is None:
            raise TaskDataError(f"example {example.id!r}: expected one question, found a conversation")
        facts.append(fact)
    return facts


def _pictures(examples: Sequence[Example], model: str) -> dict[str, str]:
    """By id of an example, what its pictures are like."""
    if not examples:
        return {}
    from inducekv_vllm.backbone.turns import turn_marks
    from inducekv_vllm.facts import packed

    from ..backbone.token_values import picture_states

    backbone = load_backbone(model)
    marks = turn_marks(backbone.processor)
    states = picture_states(backbone, [backbone.encode_example(example) for example in examples], marks)
    return {each.id: packed(state) for each, state in zip(examples, states, strict=True) if state is not None}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", required=True, help="model folder or Hugging Face id")
    parser.add_argument("--bundle", type=Path, help="the version before (default: none, a bundle of facts alone)")
    parser.add_argument(
        "--task",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="task data: each example is a fact, with its pictures; an id that the bundle has is corrected; repeatable",
    )
    parser.add_argument(
        "--forget", action="append", default=[], metavar="ID", help="leave out the fact of this id; repeatable"
    )
    parser.add_argument("--budget-bytes", type=int, help="of tensors and facts (default: as before, at first 64 MiB)")
    parser.add_argument(
        "--when-full",
        choices=("forget", "refuse"),
        default="forget",
        help="beyond the budget, forget the earlier facts that were taught longest ago, or refuse (default: forget)",
    )
    parser.add_argument(
        "--strictness",
        choices=tuple(STRICTNESS),
        help="how much requests may differ from the facts' questions (default: as before, at first normal)",
    )
    add_flags(parser, {"": ColumnOptions})
    add_output(parser)
