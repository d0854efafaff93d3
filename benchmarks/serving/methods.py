"""The compared methods: the model name of a request, its options, and its prompt."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from benchmarks.chat import Message
from benchmarks.serving.prompts import PromptMaker
from inducekv_vllm.activation import ACTIVATIONS, Activation

BASE_METHOD = "none"
LONGER_PROMPT = "longer_prompt"
PROMPT_REPLAY = "prompt_replay"
BUDGETS = (64, 256)
TOP_K = 8
PAYLOAD_TOKENS = 8
LONGER_BY = 256 * PAYLOAD_TOKENS  # tokens: what the largest memory would cost if it were text
DECOUPLED_BUDGET = 64
PROMPT_TOKENS = 256


@dataclass(frozen=True)
class Method:
    name: str
    model: str
    messages: Callable[[], list[Message]]
    xargs: dict[str, Any] = field(default_factory=dict)


def bundle_name(budget: int) -> str:
    return f"memory_B{budget}"


def decoupled_name(activation: Activation) -> str:
    return f"decoupled_B{DECOUPLED_BUDGET}_{activation}"


def make_methods(prompts: PromptMaker, base: str, context: int, output_tokens: int, prompt_tokens: int) -> list[Method]:
    """All methods, over prompts of `prompt_tokens` tokens and a context of `context` tokens."""
    room = context - output_tokens - prompt_tokens
    replayed = min(len(prompts.exemplars), room // prompts.exemplar_tokens())

    def question() -> list[Message]:
        return prompts.question(prompt_tokens)

    methods = [Method(BASE_METHOD, base, question)]
    for budget in BUDGETS:
        name = bundle_name(budget)
        methods.append(Method(f"{name}_all", name, question))
        methods.append(Method(f"{name}_top{TOP_K}", name, question, {"inducekv_top_k": TOP_K}))
    methods += [Method(decoupled_name(activation), decoupled_name(activation), question) for activation in ACTIVATIONS]
    methods.append(Method(LONGER_PROMPT, base, lambda: prompts.question(prompt_tokens + LONGER_BY)))
    methods.append(Method(PROMPT_REPLAY, base, lambda: prompts.replayed(replayed, prompt_tokens)))
    return methods
