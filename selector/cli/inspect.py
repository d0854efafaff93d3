"""`inducekv-bundle inspect`: what a bundle holds."""

import argparse
from collections import Counter
from datetime import UTC, datetime
from typing import Any

from rich.console import Console
from rich.markup import escape

from inducekv_vllm.bundle import BackboneFingerprint, Bundle, BundleMetadata, read_bundle

from ..update.measures import entry_bytes, stored_gate_bytes
from .common import SUCCESS, add_bundle

# For people and pipes alike: never wrapped to the terminal's width.
_output = Console(soft_wrap=True, highlight=False, emoji=False)


def run(options: argparse.Namespace) -> int:
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
        **({} if metadata.layers is None else {"layers": ", ".join(map(str, metadata.layers))}),
        "footprint": f"{size} bytes ({size / 2**20:.2f} MiB)",
        **_gate(bundle),
        **_form_summary(metadata),
        "weighting": metadata.weighting,
        "temperature": f"{float(bundle.temperature):.6g}",
        "value gates": f"{float(gates.min()):.4g} to {float(gates.max()):.4g}",
        "layer bias": f"{float(bias.min()):.4g} to {float(bias.max()):.4g}",
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


def _gate(bundle: Bundle) -> dict[str, str]:
    if (gate := bundle.gate) is None:
        return {"relevance gate": "none"}
    thresholds = ", ".join(
        f"{task} (threshold {threshold:.4g})"
        for task, threshold in zip(gate.tasks, gate.thresholds.tolist(), strict=True)
    )
    layers = " and ".join(map(str, gate.layers))
    marks = f"turns begin with {list(gate.marks.begin)}" if gate.marks.begin else "no turn marks"
    end = "" if gate.marks.end is None else f", end with {gate.marks.end}"
    looks_with = f"{gate.prototypes.shape[1]} prototypes of each"
    if gate.classified:
        looks_with = f"their means and the question's words, in classifiers of {gate.classified} tasks"
    return {
        "relevance gate": f"{thresholds}; {stored_gate_bytes(bundle)} bytes",
        "gate looks at": f"values of layer {layers}, {looks_with}; {marks}{end}",
    }


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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_bundle(parser)
    parser.add_argument("--entries", action="store_true", help="list every entry and fact")
