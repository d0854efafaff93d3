"""What in a request forbids the answer of a fact. Decisions are shared between requests for one prompt; this is not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from vllm.sampling_params import SamplingParams

from .protocol import Decided, Decision

BANNED: Final = -100.0  # a bias that bans a token


def permitted(decided: Decided, params: SamplingParams | None) -> Decided:
    """What is decided for a request with these parameters: a fact is withheld if they forbid its answer."""
    return decided if params is None else Decided(tuple(_permitted(each, params) for each in decided.each))


def _permitted(decision: Decision, params: SamplingParams) -> Decision:
    if decision.fact is None or decision.answer is None:
        return decision
    return replace(decision, fact=replace(decision.fact, withheld=why_forbidden(params, decision.answer)))


def why_forbidden(params: SamplingParams, answer: Sequence[int]) -> str | None:
    """What forbids an answer's tokens; None if nothing does."""
    if params.structured_outputs is not None:
        return "the request asks for structured output"
    biases = params.logit_bias or {}
    if any(biases.get(token, 0.0) <= BANNED for token in answer):
        return "logit_bias bans one of its tokens"
    if params.allowed_token_ids is not None and not set(answer) <= set(params.allowed_token_ids):
        return "one of its tokens is not in allowed_token_ids"
    ids = list(answer)
    for bad in params.bad_words_token_ids or ():
        if any(ids[at : at + len(bad)] == bad for at in range(len(ids))):
            return "bad_words bans one of its words"
    return None
