"""How an engine is asked to judge: one token, first in line (`scheduler.py`), its instruction in the prefix cache."""

from __future__ import annotations

from vllm.outputs import RequestOutput
from vllm.sampling_params import SamplingParams

from ..facts.judge import JudgePrompt, log_odds
from ..protocol import JUDGE


def judge_params(prompt: JudgePrompt, *, goes_first: bool = True) -> SamplingParams:
    """Of a request with one of its prompts; nobody waits for it, if it does not go first."""
    extra = {JUDGE: True} if goes_first else None
    return SamplingParams(max_tokens=1, temperature=0, logprob_token_ids=[prompt.yes, prompt.no], extra_args=extra)


def odds_in(output: RequestOutput, prompt: JudgePrompt) -> float:
    """What was said."""
    logprobs = output.outputs[0].logprobs
    assert logprobs
    return log_odds(*(logprobs[0][token].logprob for token in (prompt.yes, prompt.no)))
