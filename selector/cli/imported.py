"""`inducekv-bundle import`: a memory that was trained elsewhere, or the keys and values of a text, as a bundle."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Final

from inducekv_vllm.bundle import write_bundle
from inducekv_vllm.bundle.metadata import MAX_ID, is_unicode
from inducekv_vllm.errors import ConfigError

from ..runtime.files import require_output
from ..runtime.progress import note
from .common import SUCCESS, add_output
from .loading import load_backbone

if TYPE_CHECKING:
    from ..imported.source import Source

KINDS: Final = ("peft", "cartridge", "text")
ROLES: Final = ("system", "user", "assistant")


def run(options: argparse.Namespace) -> int:
    """Make a bundle of a prefix or soft prompt of PEFT, a cartridge, or a text; it acts exactly as in its source.

    With --share a text keeps a part of its tokens, which acts nearly so. It acts on every request, until `gate-fit`
    gives it a gate.
    """
    for name in ("role", "share"):
        if getattr(options, name) is not None and options.kind != "text":
            raise ConfigError(f"--{name} is for a text, found {options.kind}")
    if options.share is not None and (options.role or options.share < 1):
        found = f"--role {options.role}" if options.role else options.share
        raise ConfigError(f"--share is a number of tokens, 1 at least, of a text as it is, found {found}")
    task = options.task or options.source.resolve().stem
    if len(task) > MAX_ID or not is_unicode(task):
        raise ConfigError(f"--task must be Unicode of at most {MAX_ID} characters, found {len(task)}: {task!r:.80}")
    require_output(options.output, options.source)
    source = _read(options)  # before the model, which takes longer to load

    from ..imported.bundle import import_source

    backbone = load_backbone(options.model, "cpu")  # on the CPU, where float32 is exact
    if source.base and Path(source.base).name != Path(options.model).name:
        note(f"inducekv-bundle: warning: {options.source} was trained with {source.base}, the model is {options.model}")
    bundle = import_source(backbone, source, task=task)
    write_bundle(bundle, options.output)
    print(f"{options.output}: {bundle.payload_tokens} tokens, digest {bundle.digest}")
    return SUCCESS


def _read(options: argparse.Namespace) -> Source:
    from ..document.source import compacted_source
    from ..imported.cartridge import cartridge_source
    from ..imported.peft import peft_source
    from ..imported.text import text_source

    if options.share:
        return compacted_source(options.source, options.share)
    if options.kind == "text":
        return text_source(options.source, options.role)
    return (peft_source if options.kind == "peft" else cartridge_source)(options.source)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("kind", choices=KINDS, help="what it is")
    text = "an adapter's folder, a cartridge's file, or a text in UTF-8"
    parser.add_argument("source", metavar="SOURCE", type=Path, help=text)
    parser.add_argument("--model", required=True, help="model folder or Hugging Face id: the one it was trained with")
    parser.add_argument("--role", choices=ROLES, help="a text is a turn of the chat template (default: as it is)")
    parser.add_argument("--share", type=int, metavar="TOKENS", help="a text keeps one of so many tokens (default: all)")
    parser.add_argument("--task", help="name of the entry and its task (default: the source's name)")
    add_output(parser)
