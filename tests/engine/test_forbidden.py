"""What a request forbids is obeyed: its fact stays out, and the decision says why; nothing else keeps a fact out."""

from typing import Any

import pytest
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from inducekv_vllm.forbidden import why_forbidden

ANSWER = (7, 8, 7, 2)


def sampling(bad_words: list[list[int]] | None = None, **changes: Any) -> SamplingParams:
    params = SamplingParams(**changes)
    params._bad_words_token_ids = bad_words  # as vLLM's input processor sets them
    return params


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"structured_outputs": StructuredOutputsParams(json={"type": "object"})}, "structured output"),
        ({"structured_outputs": StructuredOutputsParams(choice=["yes", "no"])}, "structured output"),
        ({"logit_bias": {8: -100.0}}, "logit_bias bans one of its tokens"),
        ({"logit_bias": {2: -100.0}}, "logit_bias bans one of its tokens"),  # it could not end
        ({"allowed_token_ids": [7, 8]}, "not in allowed_token_ids"),
        ({"bad_words": [[8, 7]]}, "bad_words bans one of its words"),
        ({"bad_words": [[5], [2]]}, "bad_words bans one of its words"),
        ({"min_tokens": 4}, "min_tokens is 4, and the answer has 3"),  # the model would go on behind it
    ],
)
def test_what_forbids_an_answer(changes: dict[str, Any], why: str) -> None:
    found = why_forbidden(sampling(**changes), ANSWER)
    assert found is not None
    assert why in found


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"temperature": 1.5, "top_p": 0.1, "top_k": 1, "min_p": 0.9, "presence_penalty": 2.0, "seed": 1},
        {"logit_bias": {8: -99.0, 5: -100.0}},
        {"allowed_token_ids": [2, 7, 8, 9]},
        {"bad_words": [[7, 7], [8, 2]]},
        {"stop": ["a"], "min_tokens": 3, "max_tokens": 10, "logprobs": 3},
    ],
)
def test_what_does_not(changes: dict[str, Any]) -> None:
    assert why_forbidden(sampling(**changes), ANSWER) is None
