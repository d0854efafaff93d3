"""What methods are called, in the order of the page, and which of them belong together."""

from __future__ import annotations

from collections.abc import Mapping

# The paper's, and the practical one: with either form of memory, and with facts.
RECIPES = ("paper", "refined", "refined_decoupled", "refined_facts")
RIVALS = ("gated_lora_replay", "lora_replay")  # whom the recipes are held against first

TITLES: Mapping[str, str] = {
    "no_memory": "no memory",
    "paper": "InduceKV (paper)",
    "refined_decoupled": "InduceKV (decoupled)",
    "refined_facts": "InduceKV (decoupled, facts)",
    "refined": "InduceKV (refined)",
    "random_memory": "random memory",
    "kcenter_memory": "k-center memory",
    "lora": "LoRA",
    "lora_replay": "LoRA + replay",
    "er_replay": "ER + replay",
    "gated_lora_replay": "gated LoRA + replay",
    "gated_task_lora": "one gated LoRA a task",
    "ewc": "EWC",
    "lwf": "LwF",
    "mas": "MAS",
    "der_plus_plus": "DER++",
    "o_lora": "O-LoRA",
    "reg_lora": "RegLoRA",
    "moe_lora": "MoELoRA",
    "smolora": "SMoLoRA",
    "prompt_replay": "PromptReplay",
    "knn_copier": "nearest-neighbour copier",
}
# A recipe with one part changed: what is changed, and whom it differs from in that part alone.
ABLATIONS: Mapping[str, tuple[str, str]] = {
    "paper_no_bilevel": ("no bilevel coupling", "paper"),
    "paper_no_anchors": ("no anchors", "paper"),
    "paper_no_coverage": ("no coverage", "paper"),
    "fixed_calibration": ("no inner calibration (fixed temperature and gates)", "paper"),
    "paper_no_gates": ("no value gates", "paper"),
    "paper_uniform": ("uniform weights", "paper"),
    "refined_no_gate": ("no relevance gate", "refined"),
    "refined_no_quotas": ("no quotas", "refined"),
    "refined_no_refinement": ("no refinement", "refined"),
    "refined_sqrt": ("sqrt weighting, no relevance gate", "refined_no_gate"),
}


def title(method: str) -> str:
    """For people; an ablation is named after what it changes."""
    if method in ABLATIONS:
        recipe = "paper" if ABLATIONS[method][1] == "paper" else "refined"
        return f"{TITLES[recipe]}, {ABLATIONS[method][0]}"
    return TITLES.get(method, method.replace("_", " "))


def is_ours(method: str) -> bool:
    """Whether it is a recipe of InduceKV, or one of its ablations."""
    return method in RECIPES or method in ABLATIONS


def place(method: str) -> tuple[int, str]:
    """Puts methods in order: as they stand above, unknown ones last."""
    known = [*TITLES, *ABLATIONS]
    return (known.index(method) if method in known else len(known), method)
