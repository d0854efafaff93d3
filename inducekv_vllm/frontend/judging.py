"""How a judge is asked beside requests: an engine, or a classifier of pairs.

An engine says one token, first in line (`scheduler.py`), with its instruction in the prefix cache. A classifier runs in
a thread of its own.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol
from uuid import uuid4

from vllm.inputs.engine import tokens_input
from vllm.outputs import RequestOutput
from vllm.sampling_params import SamplingParams

from ..backbone.pair_classifier import PairClassifier
from ..judge import JudgePrompt, Pair, log_odds
from ..protocol import JUDGE


class AskedJudge(Protocol):
    """It belongs to an event loop."""

    async def said(self, pairs: Sequence[Pair], *, goes_first: bool = True) -> list[float]:
        """The log-odds that the second of a pair asks what the first asks; nobody waits if it does not go first."""
        ...


class EngineJudge:
    """The model that an engine serves."""

    def __init__(self, generate: Callable[..., AsyncGenerator[RequestOutput, None]], prompt: JudgePrompt) -> None:
        """`generate` is vLLM's own."""
        self._generate, self._prompt = generate, prompt

    async def said(self, pairs: Sequence[Pair], *, goes_first: bool = True) -> list[float]:
        return await asyncio.gather(*(self._answer(pair, goes_first) for pair in pairs))

    async def _answer(self, pair: Pair, goes_first: bool) -> float:
        prompt, params = tokens_input(self._prompt.token_ids(pair)), judge_params(self._prompt, goes_first=goes_first)
        async with contextlib.aclosing(self._generate(prompt, params, f"judge-{uuid4()}")) as outputs:
            async for output in outputs:
                if output.finished:
                    return odds_in(output, self._prompt)
        raise RuntimeError("the engine ended a request without an answer")


class ClassifierJudge:
    """A classifier of pairs."""

    def __init__(self, classifier: PairClassifier) -> None:
        self._classifier, self._thread = classifier, ThreadPoolExecutor(1, "inducekv-judge")

    async def said(self, pairs: Sequence[Pair], *, goes_first: bool = True) -> list[float]:
        """In the order of the calls. Raises UnsupportedModel: the classifier cannot be loaded."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._classifier.said, pairs)


def judge_params(prompt: JudgePrompt, *, goes_first: bool = True) -> SamplingParams:
    """Of a request with one of its prompts."""
    extra = {JUDGE: True} if goes_first else None
    return SamplingParams(max_tokens=1, temperature=0, logprob_token_ids=[prompt.yes, prompt.no], extra_args=extra)


def odds_in(output: RequestOutput, prompt: JudgePrompt) -> float:
    """What was said."""
    logprobs = output.outputs[0].logprobs
    assert logprobs
    return log_odds(*(logprobs[0][token].logprob for token in (prompt.yes, prompt.no)))
