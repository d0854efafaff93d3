"""`inducekv-bundle import`: a memory that was trained elsewhere, or the keys and values of a text, as a bundle."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from inducekv_vllm.bundle import PayloadDtype, write_bundle
from inducekv_vllm.bundle.metadata import MAX_ID, is_unicode
from inducekv_vllm.errors import ConfigError

from ..gate.settings import GateOptions
from ..runtime.files import require_output
from ..runtime.progress import note
from .gate_questions import add_fit_flags, fit_settings, read_others_of, require_no_fit
from .gate_tables import print_fitted
from .loading import load_backbone

if TYPE_CHECKING:
    from ..backbone.model import Backbone
    from ..gate.fit import FittedGate
    from ..imported.source import Source

SUCCESS = 0
Command = Callable[[argparse.Namespace], int]
KINDS = ("peft", "cartridge", "text")
ROLES = ("system", "user", "assistant")


def import_memory(options: argparse.Namespace) -> int:
    """Make a bundle of a prefix or soft prompt of PEFT, a cartridge, or a text; it acts exactly as in its source."""
    if options.role and options.kind != "text":
        raise ConfigError(f"--role is for a text, found {options.kind}")
    if (options.gate is None) != (options.base is None):
        raise ConfigError("a gate needs --gate, questions that open it, and --base, others")
    fit_settings(options)
    if options.gate is None:
        require_no_fit(options)
    task = options.task or options.source.resolve().stem
    if len(task) > MAX_ID or not is_unicode(task):
        raise ConfigError(f"--task must be Unicode of at most {MAX_ID} characters, found {len(task)}: {task!r:.80}")
    require_output(options.output, options.source, options.gate, options.base, options.background, options.near_misses)
    source = _read(options)  # before the model, which takes longer to load

    from ..imported.bundle import import_source

    backbone = load_backbone(options.model, options.device)
    if source.base and Path(source.base).name != Path(options.model).name:
        note(f"inducekv-bundle: warning: {options.source} was trained with {source.base}, the model is {options.model}")
    bundle = import_source(backbone, source, task=task, dtype=options.payload_dtype)
    fitted = None
    if options.gate is not None:
        fitted, recorded = _fitted(backbone, task, options)
        bundle = bundle.with_gate(fitted.gate, recorded)
    write_bundle(bundle, options.output)
    print(f"{options.output}: {bundle.payload_tokens} tokens, digest {bundle.digest}")
    if fitted is not None:
        print_fitted(fitted)
    return SUCCESS


def _read(options: argparse.Namespace) -> Source:
    from ..imported.cartridge import cartridge_source
    from ..imported.peft import peft_source
    from ..imported.text import text_source

    if options.kind == "text":
        return text_source(options.source, options.role)
    return (peft_source if options.kind == "peft" else cartridge_source)(options.source)


def _fitted(backbone: Backbone, task: str, options: argparse.Namespace) -> tuple[FittedGate, dict[str, Any]]:
    """A gate, and what is recorded of its fit. Raises ConfigError, TaskDataError: the questions make none."""
    from ..data.examples import read_task
    from ..gate.fit import fit_gate

    settings, data = fit_settings(options), read_others_of(options).of({task: read_task(options.gate)})
    fitted = fit_gate(backbone, data, GateOptions.of(settings), progress=True)
    return fitted, {**settings.model_dump(), **fitted.recorded}


def add_command(command: Callable[[str, Command], argparse.ArgumentParser]) -> None:
    """Add this command to the parser of `inducekv-bundle`."""
    added = command("import", import_memory)
    added.add_argument("kind", choices=KINDS, help="what it is")
    added.add_argument(
        "source", metavar="SOURCE", type=Path, help="an adapter's folder, a cartridge's file, or a text in UTF-8"
    )
    added.add_argument("--model", required=True, help="model folder or Hugging Face id: the one it was trained with")
    added.add_argument("--role", choices=ROLES, help="a text is a turn of the chat template (default: as it is)")
    added.add_argument("--task", help="name of the entry and its task (default: the source's name)")
    added.add_argument(
        "--payload-dtype",
        choices=get_args(PayloadDtype),
        help="of keys and values in the file (default: float32 for a checkpoint of float32, else float16)",
    )
    added.add_argument("--gate", type=Path, metavar="FILE", help="fit a gate, which these questions open")
    added.add_argument("--base", type=Path, metavar="FILE", help="questions that the model answers well by itself")
    add_fit_flags(added)
    added.add_argument("--device", default="cpu", help="torch device of the forward pass (default cpu)")
    added.add_argument("--output", type=Path, required=True, help="the bundle file to write, replaced if it exists")
