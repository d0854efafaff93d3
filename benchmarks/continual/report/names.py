"""What methods are called on the page, and which of them belong together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

RECIPES = ("paper", "refined")  # InduceKV as the paper has it, and the practical form
RIVALS = ("gated_lora_replay", "lora_replay")  # whom the recipes are held against first

# name: (title, what it is)
METHODS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "no_memory": ("no memory", "the untouched model"),
        "paper": ("InduceKV (paper)", "the paper's recipe: training prefixes are selected, and kept as they are"),
        "refined": (
            "InduceKV (refined)",
            "the practical recipe: what is kept of the prefixes is trained, behind a gate",
        ),
        "random_memory": ("random memory", "prefixes drawn at random, nothing optimised"),
        "k_center_memory": ("k-center memory", "prefixes far from each other, nothing optimised"),
        "lora": ("LoRA", "one low-rank adapter, trained on one task after the other"),
        "lora_replay": ("LoRA + replay", "the same, with anchors of earlier tasks in every batch"),
        "er_replay": ("ER + replay", "the same adapter with experience replay"),
        "gated_lora_replay": ("gated LoRA + replay", "LoRA + replay behind InduceKV's own relevance gate"),
        "gated_task_lora": ("gated adapters", "one small LoRA adapter a task, chosen by InduceKV's own relevance gate"),
        "ewc": ("EWC", "the adapter, held where earlier tasks need it (elastic weight consolidation)"),
        "lwf": ("LwF", "the adapter, held to its own earlier answers (learning without forgetting)"),
        "prompt_replay": ("PromptReplay", "retrieved training examples stand in the prompt"),
        "knn_copier": ("nearest-neighbour copier", "copies the answer of the nearest stored example: the sanity floor"),
    }
)


def title(method: str) -> str:
    """For people; an ablation is named after what it leaves out."""
    if method in METHODS:
        return METHODS[method][0]
    if (full := full_method(method)) is not None:
        return f"{METHODS[full][0]}, {method.removeprefix(full + '_').replace('_', ' ')}"
    return method.replace("_", " ")


def described(method: str) -> str:
    """What it is, in half a sentence; empty where nothing is known of it."""
    if method in METHODS:
        return METHODS[method][1]
    full = full_method(method)
    return "" if full is None else f"{METHODS[full][0]} with one part changed"


def full_method(method: str) -> str | None:
    """The recipe that a method is an ablation of; None where it is none."""
    return next((recipe for recipe in RECIPES if method.startswith(recipe + "_")), None)


def is_ours(method: str) -> bool:
    """Whether it is a recipe of InduceKV, or one of its ablations."""
    return method in RECIPES or full_method(method) is not None


def place(method: str) -> tuple[int, bool, str]:
    """Puts methods in order: as they stand above, a recipe's ablations after it, unknown ones last."""
    names = list(METHODS)
    family = method if method in METHODS else full_method(method)
    return (names.index(family) if family else len(names), method not in METHODS, method)


def ablations(methods: Iterable[str], recipe: str) -> list[str]:
    return [method for method in methods if full_method(method) == recipe]


def listed(words: Iterable[str]) -> str:
    """ "a", "a and b", "a, b and c"."""
    *most, last = words
    return f"{', '.join(most)} and {last}" if most else last
