"""The compared methods: the model name of a request, its options, and its prompt."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from benchmarks.chat import Message
from benchmarks.serving.prompts import PromptMaker
from inducekv_vllm.bundle.activation import ACTIVATIONS, Activation

BASE_METHOD = "none"
LORA_BASE, LORA = "lora_none", "lora"  # on the server with the adapter
SECOND_TURN = "_turn2"
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
GATED: tuple[Activation | Literal["closed", "same_pass"], ...] = ("same_pass", "generation", "text", "prompt", "closed")
PROMPT_TOKENS = 256


@dataclass(frozen=True)
class Method:
    name: str
    model: str
    messages: Callable[[], list[Message]]
    xargs: dict[str, Any] = field(default_factory=dict)
    then: Callable[[], Message] | None = None  # the question of a second turn, which is measured
    base: str = BASE_METHOD  # what its times are compared with


def bundle_name(budget: int) -> str:
    return f"memory_B{budget}"


def decoupled_name(activation: Activation) -> str:
    return f"decoupled_B{DECOUPLED_BUDGET}_{activation}"


def gated_name(kind: str) -> str:
    return f"gated_{kind}"


def make_methods(prompts: PromptMaker, base: str, context: int, output_tokens: int, prompt_tokens: int) -> list[Method]:
    """All methods, over prompts of `prompt_tokens` tokens and a context of `context` tokens."""
    room = context - output_tokens - prompt_tokens
    replayed = min(len(prompts.exemplars), room // prompts.exemplar_tokens())

    def question() -> list[Message]:
        return prompts.question(prompt_tokens)

    def follow_up() -> Message:
        return prompts.follow_up(SECOND_TURN_TOKENS)

    methods = [Method(BASE_METHOD, base, question)]
    for budget in BUDGETS:
        name = bundle_name(budget)
        methods.append(Method(f"{name}_all", name, question))
        methods.append(Method(f"{name}_top{TOP_K}", name, question, {"inducekv_top_k": TOP_K}))
    decoupled = [Method(decoupled_name(activation), decoupled_name(activation), question) for activation in ACTIVATIONS]
    gated = [Method(gated_name(kind), gated_name(kind), question) for kind in GATED]
    methods += [*decoupled, *gated]
    methods.append(Method(LONGER_PROMPT, base, lambda: prompts.question(prompt_tokens + LONGER_BY)))
    methods.append(Method(PROMPT_REPLAY, base, lambda: prompts.replayed(replayed, prompt_tokens)))
    again = {"then": follow_up, "base": BASE_METHOD + SECOND_TURN}
    return methods + [replace(each, name=each.name + SECOND_TURN, **again) for each in (methods[0], *decoupled, *gated)]


def lora_methods(prompts: PromptMaker, base: str, prompt_tokens: int) -> list[Method]:
    """The server with an adapter: the adapter, and no adapter."""

    def question() -> list[Message]:
        return prompts.question(prompt_tokens)

    return [Method(LORA_BASE, base, question, base=LORA_BASE), Method(LORA, LORA, question, base=LORA_BASE)]
