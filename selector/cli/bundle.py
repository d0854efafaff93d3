"""`inducekv-bundle`: inspect, verify, compare, plan, build, import, teach, evaluate, sign, shorten and publish bundles,
fit and measure their gates, see and change what a server has loaded, and check audit chains.

Exit status: 0 for success, 1 if `diff` finds a difference or `publish` a server that serves another version, 2 for an
error, printed in one line on standard error.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, get_args

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from inducekv_vllm.backbone.footprint import PAPER_BUDGETS, plan, read_config, text_geometry
from inducekv_vllm.bundle import (
    ENTRY_AXES,
    BackboneFingerprint,
    Bundle,
    BundleMetadata,
    PayloadDtype,
    read_bundle,
    read_public_key,
    require_signature,
    write_bundle,
)
from inducekv_vllm.errors import ConfigError, InduceKVError

from ..runtime.files import require_output
from ..update.measures import entry_bytes
from ..update.settings import BuildSettings
from .columns import ColumnOptions, columns_of
from .eval_gate import add_command as add_eval_gate
from .evaluate import add_command as add_eval
from .flags import Parser, add_flags, error_line
from .gate_fit import add_command as add_gate_fit
from .gate_tables import gate_differences, gate_summary, tensor_difference
from .imported import add_command as add_import
from .loading import load_backbone
from .provenance import add_commands
from .publish import add_command as add_publish
from .route import add_command as add_route
from .served import add_commands as add_served
from .teach import add_command as add_teach
from .warned import warnings_as_lines

SUCCESS, DIFFERENT, FAILED = 0, 1, 2
# For people and pipes alike: never wrapped to the terminal's width.
_output = Console(soft_wrap=True, highlight=False, emoji=False)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    try:
        options = _parser().parse_args(arguments)
        with warnings_as_lines("inducekv-bundle"):
            status: int = options.run(options)
    except InduceKVError as error:
        print(error_line("inducekv-bundle", error), file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        print("inducekv-bundle: interrupted, nothing was written", file=sys.stderr)
        return FAILED
    return status


def inspect(options: argparse.Namespace) -> int:
    """Show what a bundle holds, after verifying it."""
    bundle = read_bundle(options.path)
    for name, value in _summary(bundle).items():
        _output.print(f"[bold]{name:<16}[/bold]{escape(str(value))}")
    if options.entries:
        print("\nentry\tid\ttask\tsource digest\tcreated\texpires")
        for number, entry in enumerate(bundle.metadata.entries):
            dates = [_date(entry.created_at), _date(entry.expires_at)]
            print(number, entry.id, entry.task, entry.source_digest, *dates, sep="\t")
        for fact in bundle.metadata.facts:
            dates = [_date(fact.created_at), _date(fact.expires_at)]
            print("fact", fact.id, fact.task, fact.source_digest, *dates, sep="\t")
    return SUCCESS


def verify(options: argparse.Namespace) -> int:
    """Check a bundle's structure, values and digest; with --model that it was made for that model, with --public-key
    that one of these keys has signed it.
    """
    bundle = read_bundle(options.path)
    if options.public_key:
        require_signature(
            bundle.signature, bundle.digest, [read_public_key(p) for p in options.public_key], options.path
        )
    if options.model:
        from inducekv_vllm.backbone.fingerprint import backbone_fingerprint

        bundle.require_backbone(backbone_fingerprint(options.model), options.path)
    print(f"{options.path}: good, {bundle.num_entries} entries, digest {bundle.digest}")
    return SUCCESS


def diff(options: argparse.Namespace) -> int:
    """List how two bundles differ: metadata, entries, tensors."""
    old, new = read_bundle(options.old), read_bundle(options.new)
    if old.digest == new.digest:
        print(f"identical, digest {old.digest}")
        return SUCCESS
    for line in _differences(old, new):
        print(line)
    return DIFFERENT


def show_plan(options: argparse.Namespace) -> int:
    """Print the footprint of several budgets for a model's configuration."""
    m, budgets = options.payload_tokens, options.budget or PAPER_BUDGETS
    for flag, value in (("--payload-tokens", m), ("--budget", min(budgets))):
        if value < 1:
            raise ConfigError(f"{flag} must be at least 1, found {value}")
    geometry = text_geometry(read_config(options.config))
    heads = f"KV heads {geometry.num_kv_heads}, head size {geometry.head_dim}"
    if geometry.per_head is not None:
        heads = f"latents for all heads: keys of {geometry.head_dim}, values of {geometry.value_dim}"
    stored = getattr(torch, options.payload_dtype).itemsize
    sizes = f"layers {geometry.num_layers}, {heads}, hidden size {geometry.hidden_size}"
    print(f"{sizes}, payload tokens {m}, keys and values in {options.payload_dtype}")
    columns = ["entries", "KV tokens a layer", "bytes", "MiB"]
    rows = [
        [str(row.budget), str(row.tokens), str(row.bytes), f"{row.mebibytes:.2f}"]
        for row in plan(geometry, m, budgets, stored)
    ]
    if geometry.per_head is not None:
        columns.append("MiB by the paper's formula, of keys and values per head")
        for line, row in zip(rows, plan(geometry.per_head, m, budgets, stored), strict=True):
            line.append(f"{row.mebibytes:.2f}")
    table = Table(*columns, box=None)
    for line in rows:
        table.add_row(*line)
    _output.print(table)
    return SUCCESS


def build(options: argparse.Namespace) -> int:
    """Extract entries of a task into a new bundle, without optimisation."""
    settings = BuildSettings(**{name: getattr(options, name) for name in BuildSettings.model_fields if name in options})
    require_output(options.output, options.task)

    from ..data.examples import read_task
    from ..data.repeats import distinct

    # Before the model, which takes longer to load.
    examples = distinct(read_task(options.task, columns_of(options)))

    from ..update.build import build_bundle

    backbone = load_backbone(options.model, options.device)
    backbone.require_full_attention()
    bundle = build_bundle(backbone, examples, settings, progress=True)
    write_bundle(bundle, options.output)
    print(f"{options.output}: {bundle.num_entries} entries of {len(examples)} examples, digest {bundle.digest}")
    return SUCCESS


def _summary(bundle: Bundle) -> dict[str, Any]:
    metadata, backbone = bundle.metadata, bundle.metadata.backbone
    size = entry_bytes(bundle)
    tasks = Counter(entry.task for entry in metadata.entries)
    gates, bias = bundle.value_gates, bundle.layer_bias
    return {
        "digest": bundle.digest,
        "parent": metadata.parent_digest or "none",
        "signed by": bundle.signature.key if bundle.signature else "nobody",
        "format version": metadata.format_version,
        "recipe": metadata.recipe,
        "settings": ", ".join(f"{name}={value}" for name, value in metadata.settings.items()) or "none",
        "entries": f"{bundle.num_entries} of {metadata.budget}",
        **_dates(metadata),
        "tasks": ", ".join(f"{task} ({count})" for task, count in tasks.items()),
        "facts": len(metadata.facts),
        "payload tokens": f"{metadata.payload_tokens} an entry, {bundle.num_entries * metadata.payload_tokens} in all",
        "footprint": f"{size} bytes ({size / 2**20:.2f} MiB)",
        **gate_summary(bundle),
        **_form_summary(metadata),
        "weighting": metadata.weighting,
        "temperature": f"{float(bundle.temperature):.6g}",
        "value gates": f"{float(gates.min()):.4g} to {float(gates.max()):.4g}",
        "layer bias": f"{float(bias.min()):.4g} to {float(bias.max()):.4g}",
        "adapter": metadata.adapter or "none",
        "backbone": f"{backbone.architecture}, {backbone.num_layers} layers, {_heads(backbone)}, "
        f"hidden size {backbone.hidden_size}",
        "rope": backbone.rope,
        "norm": backbone.norm,
        "tokenizer": backbone.tokenizer_digest,
        "weights": backbone.weights_digest,
    }


def _dates(metadata: BundleMetadata) -> dict[str, str]:
    """Nothing for a bundle without dates."""
    created = sorted(entry.created_at for entry in metadata.entries if entry.created_at)
    expiring = sorted(entry.expires_at for entry in metadata.entries if entry.expires_at)
    dates = {"created": f"{_date(created[0])} to {_date(created[-1])}"} if created else {}
    if expiring:
        now = datetime.now(UTC)
        expired = sum(entry.has_expired(now) for entry in metadata.entries)
        dates["expire"] = f"{len(expiring)} entries, the first at {_date(expiring[0])}; {expired} have expired"
    return dates


def _date(moment: datetime | None) -> str:
    return f"{moment:%Y-%m-%dT%H:%M:%SZ}" if moment else "-"


def _heads(backbone: BackboneFingerprint) -> str:
    if backbone.value_dim is not None:
        return f"latents (keys of {backbone.head_dim}, values of {backbone.value_dim})"
    return f"{backbone.num_kv_heads} KV heads of {backbone.head_dim}"


def _form_summary(metadata: BundleMetadata) -> dict[str, str]:
    """Nothing for merged memory, which every older bundle is."""
    if metadata.form == "merged":
        return {}
    activations = ", ".join(f"{task} ({activation})" for task, activation in metadata.activations.items())
    adapters = ", ".join(f"{r.task} ({r.path}, rank {r.rank}, {r.digest:.12})" for r in metadata.task_adapters)
    summary = {"form": metadata.form, "memory acts on": activations or "none", "task adapters": adapters or "none"}
    if metadata.output_map is not None:
        summary["maps"] = f"rank {metadata.output_map.rank} of width {metadata.output_map.width}"
    return summary


def _differences(old: Bundle, new: Bundle) -> list[str]:
    """One line for each difference; at least one where the digests differ."""
    lines = []
    for name in type(old.metadata.backbone).model_fields:
        before, after = getattr(old.metadata.backbone, name), getattr(new.metadata.backbone, name)
        if before != after:
            lines.append(f"backbone {name}: {before} -> {after}")
    for name in type(old.metadata).model_fields:
        before, after = getattr(old.metadata, name), getattr(new.metadata, name)
        if name not in ("backbone", "entries", "facts") and before != after:  # these are compared one by one
            lines.append(f"{name}: {before} -> {after}")
    old_facts, new_facts = ({fact.id: fact for fact in each.metadata.facts} for each in (old, new))
    lines += [f"fact removed: {identity}" for identity in old_facts if identity not in new_facts]
    lines += [f"fact added: {identity}" for identity in new_facts if identity not in old_facts]
    lines += [
        f"fact changed: {identity}"
        for identity, fact in new_facts.items()
        if identity in old_facts and old_facts[identity] != fact
    ]

    old_rows = {entry.id: row for row, entry in enumerate(old.metadata.entries)}
    new_rows = {entry.id: row for row, entry in enumerate(new.metadata.entries)}
    kept = [identity for identity in old_rows if identity in new_rows]
    lines += [f"entry removed: {identity}" for identity in old_rows if identity not in new_rows]
    lines += [f"entry added: {identity}" for identity in new_rows if identity not in old_rows]
    if kept != [identity for identity in new_rows if identity in old_rows]:
        lines.append("entries kept are in another order")
    for identity in kept:
        before, after = old.metadata.entries[old_rows[identity]], new.metadata.entries[new_rows[identity]]
        if before != after:
            lines.append(f"entry {identity}: made from another example: {before!r} -> {after!r}")

    for name, axis in ENTRY_AXES.items():
        if name not in old.tensors() or name not in new.tensors():
            continue  # the difference of the metadata says so
        before = old.tensors()[name].index_select(axis, torch.tensor([old_rows[i] for i in kept], dtype=torch.int64))
        after = new.tensors()[name].index_select(axis, torch.tensor([new_rows[i] for i in kept], dtype=torch.int64))
        lines += tensor_difference(f"{name} of the {len(kept)} entries kept", before, after)
    for name in ("temperature", "value_gates", "layer_bias"):
        lines += tensor_difference(name, old.tensors()[name], new.tensors()[name])
    return lines + gate_differences(old.gate, new.gate)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="inducekv-bundle", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, run: Any) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=run.__doc__, description=run.__doc__)
        added.set_defaults(run=run)
        return added

    subparser = command("inspect", inspect)
    subparser.add_argument("path", metavar="PATH", help="a bundle file")
    subparser.add_argument("--entries", action="store_true", help="list every entry")

    subparser = command("verify", verify)
    subparser.add_argument("path", metavar="PATH", help="a bundle file")
    subparser.add_argument("--model", help="model folder or Hugging Face id the bundle must fit")
    subparser.add_argument(
        "--public-key",
        action="append",
        metavar="FILE",
        help="an Ed25519 public key in PEM that must have signed the bundle; repeatable: one of them",
    )

    subparser = command("diff", diff)
    subparser.add_argument("old", metavar="A", help="a bundle file")
    subparser.add_argument("new", metavar="B", help="a bundle file")

    subparser = command("plan", show_plan)
    subparser.add_argument("--config", type=Path, required=True, help="a model's config.json")
    subparser.add_argument("--payload-tokens", type=int, default=8, help="tokens per entry and layer (default 8)")
    subparser.add_argument(
        "--budget", type=int, action="append", help="entries; repeatable (default 64, 128, 256, 512)"
    )
    subparser.add_argument(
        "--payload-dtype",
        choices=get_args(PayloadDtype),
        default="float16",
        help="of keys and values in the file; import keeps float32 of a checkpoint of float32 (default float16)",
    )

    subparser = command("build", build)
    subparser.add_argument("--model", required=True, help="model folder or Hugging Face id")
    subparser.add_argument("--task", type=Path, required=True, help="task data in any format")
    add_flags(subparser, {"": BuildSettings})
    add_flags(subparser, {"": ColumnOptions})
    subparser.add_argument("--device", default="cpu", help="torch device of the extraction (default cpu)")
    subparser.add_argument("--output", type=Path, required=True, help="the bundle file to write, replaced if it exists")
    add_import(command)
    add_route(command)
    add_gate_fit(command)
    add_eval(command)
    add_eval_gate(command)
    add_commands(command, commands)
    add_publish(command)
    add_served(command)
    add_teach(command)
    return parser


if __name__ == "__main__":
    sys.exit(main())
