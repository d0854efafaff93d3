"""What methods are called on the page, and which of them belong together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

RECIPES = ("paper", "refined", "refined_decoupled")  # the paper's, and the practical one with either form of memory
RIVALS = ("gated_lora_replay", "lora_replay")  # whom the recipes are held against first

# name: (title, what it is)
METHODS: Mapping[str, tuple[str, str]] = {
    "no_memory": ("no memory", "the untouched model"),
    "paper": ("InduceKV (paper)", "the paper's recipe: training prefixes are selected, and kept as they are"),
    "refined_decoupled": (
        "InduceKV (decoupled)",
        "the default: one trained entry a task with memory of its own softmax and a map, behind a gate",
    ),
    "refined": (
        "InduceKV (refined)",
        "the practical recipe with merged memory: trained prefixes in one softmax with the request, behind a gate",
    ),
    "random_memory": ("random memory", "prefixes drawn at random, nothing optimised"),
    "kcenter_memory": ("k-center memory", "prefixes far from each other, nothing optimised"),
    "lora": ("LoRA", "one low-rank adapter, trained on one task after the other"),
    "lora_replay": ("LoRA + replay", "the same, with anchors of earlier tasks in every batch"),
    "er_replay": ("ER + replay", "the same adapter with experience replay"),
    "gated_lora_replay": ("gated LoRA + replay", "LoRA + replay behind InduceKV's own relevance gate"),
    "gated_task_lora": (
        "one gated LoRA a task",
        "a small adapter of its own for each task, chosen by InduceKV's gate",
    ),
    "ewc": ("EWC", "the adapter, held where earlier tasks need it (elastic weight consolidation)"),
    "lwf": ("LwF", "the adapter, held to its own earlier answers (learning without forgetting)"),
    "prompt_replay": ("PromptReplay", "retrieved training examples stand in the prompt"),
    "knn_copier": ("nearest-neighbour copier", "copies the answer of the nearest stored example: the sanity floor"),
}


@dataclass(frozen=True)
class Ablation:
    """A recipe with one part changed."""

    recipe: str
    change: str
    against: str  # whom it differs from in that part alone: the recipe, or another ablation


ABLATIONS: Mapping[str, Ablation] = {
    "paper_no_bilevel": Ablation("paper", "no bilevel coupling", "paper"),
    "paper_no_anchors": Ablation("paper", "no anchors", "paper"),
    "paper_no_coverage": Ablation("paper", "no coverage", "paper"),
    "fixed_calibration": Ablation("paper", "no inner calibration (fixed temperature and gates)", "paper"),
    "paper_no_gates": Ablation("paper", "no value gates", "paper"),
    "paper_uniform": Ablation("paper", "uniform weights", "paper"),
    "refined_no_gate": Ablation("refined", "no relevance gate", "refined"),
    "refined_no_quotas": Ablation("refined", "no quotas", "refined"),
    "refined_no_refinement": Ablation("refined", "no refinement", "refined"),
    "refined_sqrt": Ablation("refined", "sqrt weighting, no relevance gate", "refined_no_gate"),
}


def title(method: str) -> str:
    """For people; an ablation is named after what it changes."""
    if method in METHODS:
        return METHODS[method][0]
    if (ablation := ablation_of(method)) is not None:
        return f"{METHODS[ablation.recipe][0]}, {ablation.change}"
    return method.replace("_", " ")


def described(method: str) -> str:
    """What it is, in half a sentence; empty where nothing is known of it."""
    if method in METHODS:
        return METHODS[method][1]
    ablation = ablation_of(method)
    return "" if ablation is None else f"{METHODS[ablation.recipe][0]} with one part changed"


def ablation_of(method: str) -> Ablation | None:
    """What a method is an ablation of; an unknown name that begins with a recipe's tells it. None where it is none."""
    if method in METHODS:
        return None
    if method in ABLATIONS:
        return ABLATIONS[method]
    recipe = next((recipe for recipe in RECIPES if method.startswith(recipe + "_")), None)
    if recipe is None:
        return None
    return Ablation(recipe, method.removeprefix(recipe + "_").replace("_", " "), recipe)


def is_ours(method: str) -> bool:
    """Whether it is a recipe of InduceKV, or one of its ablations."""
    return method in RECIPES or ablation_of(method) is not None


def place(method: str) -> tuple[int, int, str]:
    """Puts methods in order: as they stand above, a recipe's ablations after it, unknown ones last."""
    ablation = ablation_of(method)
    known, changes = list(METHODS), list(ABLATIONS)
    family = method if ablation is None else ablation.recipe
    rank = changes.index(method) + 1 if method in changes else (len(changes) + 1 if ablation else 0)
    return (known.index(family) if family in known else len(known), rank, method)


def ablations(methods: Iterable[str], recipe: str) -> dict[str, Ablation]:
    """Those of one recipe, in the order above."""
    known = {method: ablation_of(method) for method in sorted(methods, key=place)}
    return {method: ablation for method, ablation in known.items() if ablation and ablation.recipe == recipe}


def listed(words: Iterable[str]) -> str:
    """ "a", "a and b", "a, b and c"."""
    *most, last = words
    return f"{', '.join(most)} and {last}" if most else last
