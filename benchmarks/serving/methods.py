"""The compared methods: whom a request asks, its options, and its prompt."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal

from benchmarks.chat import Message
from benchmarks.serving.cells import Cell
from benchmarks.serving.prompts import PromptMaker
from inducekv_vllm.bundle.activation import ACTIVATIONS, Activation

Server = Literal["plain", "plugin", "lora"]
SERVERS: Final[tuple[Server, ...]] = ("plain", "plugin", "lora")
BASE = "base"  # the served name of the model itself
NONE, IDLE, LORA_NONE, LORA = "none", "idle", "lora_none", "lora"
OWN: Final[dict[Server, str]] = {"plugin": IDLE, "lora": LORA_NONE}  # no memory and no adapter there
SECOND_TURN = "turn2_"  # begins the names of methods that measure one
SECOND_TURN_TOKENS = 32  # what the second turn's question adds to the conversation
LONGER_PROMPT = "longer_prompt"
PROMPT_REPLAY = "prompt_replay"
BUDGETS = (64, 256)
TOP_K = 8
PAYLOAD_TOKENS = 8
LONGER_BY = 256 * PAYLOAD_TOKENS  # tokens: what the largest memory would cost if it were text
DECOUPLED_BUDGET = 64
# Behind a gate, in the sizes of the default recipe: where the memory acts, or "closed". "same_pass" is memory of the
# generation in the layers from the gate's last one on.
GATED: tuple[Activation | Literal["closed", "same_pass"], ...] = ("closed", "same_pass", "generation", "text", "prompt")


@dataclass(frozen=True)
class Method:
    name: str
    server: Server
    model: str
    messages: Callable[[Cell], list[Message]]
    xargs: dict[str, Any] = field(default_factory=dict)
    then: Callable[[], Message] | None = None  # the question of a second turn, which is measured
    needs_picture: bool = False
    more_tokens: int = 0  # of its prompt beyond the cell's

    @property
    def bases(self) -> dict[str, str]:
        """What its times are divided by: `x`, no plugin; `x_own`, the same server without memory or adapter."""
        turn = SECOND_TURN if self.then else ""
        found = {"x": turn + NONE} | ({"x_own": turn + OWN[self.server]} if self.server in OWN else {})
        return {ratio: base for ratio, base in found.items() if base != self.name}


def bundle_name(budget: int) -> str:
    return f"memory_B{budget}"


def decoupled_name(activation: Activation) -> str:
    return f"decoupled_B{DECOUPLED_BUDGET}_{activation}"


def gated_name(kind: str) -> str:
    return f"gated_{kind}"


def make_methods(prompts: PromptMaker, context: int, output_tokens: int) -> list[Method]:
    """All methods, over a context of `context` tokens."""

    def replayed(cell: Cell) -> list[Message]:
        room = context - output_tokens - max(cell.lengths)
        return prompts.replayed(room // prompts.exemplar_tokens, cell)

    def follow_up() -> Message:
        return prompts.follow_up(SECOND_TURN_TOKENS)

    none = Method(NONE, "plain", BASE, prompts.question_in)
    idle = replace(none, name=IDLE, server="plugin")
    bundles = [replace(idle, name=name, model=name) for name in (bundle_name(budget) for budget in BUDGETS)]
    top = {"inducekv_top_k": TOP_K}
    merged = [replace(each, name=f"{each.name}_all") for each in bundles]
    merged += [replace(each, name=f"{each.name}_top{TOP_K}", xargs=top) for each in bundles]
    # Without a picture, memory of the text acts where that of the prompt does.
    kinds = [(decoupled_name(kind), kind) for kind in ACTIVATIONS] + [(gated_name(kind), kind) for kind in GATED]
    decoupled = [replace(idle, name=name, model=name, needs_picture=kind == "text") for name, kind in kinds]
    longer = replace(
        none, name=LONGER_PROMPT, messages=lambda cell: prompts.question_in(cell, LONGER_BY), more_tokens=LONGER_BY
    )
    replay = replace(none, name=PROMPT_REPLAY, messages=replayed, needs_picture=True)
    again = [replace(m, name=SECOND_TURN + m.name, then=follow_up) for m in (none, idle, *decoupled)]
    lora_none = replace(none, name=LORA_NONE, server="lora")
    lora = replace(lora_none, name=LORA, model=LORA)
    return [none, idle, *merged, *decoupled, longer, replay, *again, lora_none, lora]


def chosen(methods: Sequence[Method], prefixes: Sequence[str] | None, servers: Collection[Server]) -> list[Method]:
    """On these servers, the methods whose names begin with one of `prefixes`, LoRA, and what they are compared with."""
    there = [method for method in methods if method.server in servers]
    if prefixes is None:
        return there
    wanted = [method for method in there if method.name.startswith((*prefixes, LORA))]
    names = {method.name for method in wanted} | {NONE, IDLE}
    names |= {base for method in wanted for base in method.bases.values()}
    return [method for method in there if method.name in names]


def methods_in(cell: Cell, methods: Sequence[Method], context: int, output_tokens: int) -> list[Method]:
    """Those that a cell can have: with a picture, or of prompts that fit the context."""
    most = context - output_tokens - max(cell.lengths)
    return [m for m in methods if (cell.picture or not m.needs_picture) and m.more_tokens <= most]
