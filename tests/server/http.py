"""Shared by the HTTP tests: requests and responses."""

from __future__ import annotations

from typing import Any

import openai
import torch

from inducekv_vllm.bundle import Bundle
from selector.backbone.generation import score as score_without_memory
from tests.inducekv_vllm.parity import Prompt, World
from tests.reference import reference_logprobs

TRACED = {"vllm_xargs": {"inducekv_trace": 1}}


def ask(client: openai.OpenAI, model: str, prompt: Prompt, *, max_tokens: int = 16, **options: Any) -> Any:
    """A greedy chat completion with the log-probabilities of its tokens."""
    extra = {"ignore_eos": True, "return_tokens_as_token_ids": True, **options.pop("extra_body", {})}
    settings = {"temperature": 0, "max_tokens": max_tokens, "logprobs": True, **options}
    return client.chat.completions.create(model=model, messages=prompt.messages, extra_body=extra, **settings)  # type: ignore[call-overload]


def tokens_and_logprobs(response: Any, choice: int = 0) -> tuple[list[int], list[float]]:
    content = response.choices[choice].logprobs.content
    return [int(step.token.removeprefix("token_id:")) for step in content], [step.logprob for step in content]


def trace_of(response: Any) -> dict[str, Any]:
    return response.model_extra["kv_transfer_params"]["inducekv"]  # type: ignore[no-any-return]


def deviation(
    world: World, response: Any, prompt: Prompt, bundle: Bundle | None, *, top_k: int | None = None, choice: int = 0
) -> float:
    """Largest |log p(server) - log p(transformers)| over the tokens of one choice."""
    return deviation_of_tokens(world, *tokens_and_logprobs(response, choice), prompt, bundle, top_k=top_k)


def deviation_of_tokens(
    world: World,
    tokens: list[int],
    logprobs: list[float],
    prompt: Prompt,
    bundle: Bundle | None,
    *,
    top_k: int | None = None,
) -> float:
    inputs = world.backbone.encode(prompt.chat_messages, [prompt.image])
    if bundle is None:
        expected = score_without_memory(world.backbone, [inputs], [tokens])[0]
    else:
        remainder = top_k is not None and bundle.metadata.weighting == "sqrt"  # the server's default
        expected = reference_logprobs(world.backbone, bundle, inputs, tokens, top_k=top_k, remainder=remainder)
    return float((torch.tensor(logprobs) - expected).abs().max())


def tokens_of_stream(parts: list[Any], choice: int = 0) -> tuple[list[int], list[float]]:
    """Like `tokens_and_logprobs`, from all parts of a stream."""
    steps = [
        step
        for part in parts
        for c in part.choices
        if c.index == choice and c.logprobs is not None
        for step in c.logprobs.content
    ]
    return [int(step.token.removeprefix("token_id:")) for step in steps], [step.logprob for step in steps]
