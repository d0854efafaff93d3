"""What in a request forbids the answer of a fact."""

from collections.abc import Sequence
from typing import Final

from vllm.sampling_params import SamplingParams

BANNED: Final = -100.0  # a bias that bans a token


def why_forbidden(params: SamplingParams, answer: Sequence[int]) -> str | None:
    """What forbids an answer's tokens, the last of which ends a turn; None if nothing does."""
    if params.structured_outputs is not None:
        return "the request asks for structured output"
    if params.min_tokens > len(answer) - 1:  # the last one ends it
        return f"min_tokens is {params.min_tokens}, and the answer has {len(answer) - 1}"
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
