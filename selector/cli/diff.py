"""`inducekv-bundle diff`: how two bundles differ."""

from __future__ import annotations

import argparse

import torch

from inducekv_vllm.bundle import ENTRY_AXES, Bundle, Gate, read_bundle

from .common import DIFFERENT, SUCCESS


def run(options: argparse.Namespace) -> int:
    """List how two bundles differ: metadata, entries, tensors."""
    old, new = read_bundle(options.old), read_bundle(options.new)
    if old.digest == new.digest:
        print(f"identical, digest {old.digest}")
        return SUCCESS
    for line in _differences(old, new):
        print(line)
    return DIFFERENT


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
        lines += _tensor_difference(f"{name} of the {len(kept)} entries kept", before, after)
    for name in ("temperature", "value_gates", "layer_bias"):
        lines += _tensor_difference(name, old.tensors()[name], new.tensors()[name])
    return lines + _gate_differences(old.gate, new.gate)


def _gate_differences(old: Gate | None, new: Gate | None) -> list[str]:
    """One line for each; of the tasks that both gates have. The metadata's differences list tasks and layers."""
    if old is None or new is None:
        return []
    lines: list[str] = []
    before, after = old.tensors(), new.tensors()
    for name in dict.fromkeys((*before, *after)):
        if name in ("gate_weights", "gate_thresholds"):
            continue
        if name not in before or name not in after:
            lines.append(f"{name.replace('_', ' ')}: {'new' if name in after else 'gone'}")
        else:
            lines += _tensor_difference(name.replace("_", " "), before[name], after[name])
    for task in old.tasks:
        if task in new.tasks:
            row, now = old.tasks.index(task), new.tasks.index(task)
            lines += _tensor_difference(f"gate weights of {task}", old.weights[row], new.weights[now])
            lines += _tensor_difference(f"gate threshold of {task}", old.thresholds[row], new.thresholds[now])
    return lines


def _tensor_difference(name: str, before: torch.Tensor, after: torch.Tensor) -> list[str]:
    if before.shape != after.shape:
        return [f"{name}: shape {list(before.shape)} -> {list(after.shape)}"]
    if torch.equal(before, after):
        return []
    return [f"{name}: largest change {float((before.float() - after.float()).abs().max()):.4g}"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("old", metavar="A", help="a bundle file")
    parser.add_argument("new", metavar="B", help="a bundle file")
