"""The contents of the bundles, and what each answers when it is asked alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from benchmarks.chat import Message, user_turn
from benchmarks.serving.bundles import build_bundles, decouple
from inducekv_vllm.activation import ACTIVATIONS
from inducekv_vllm.bundle import read_bundle

BUDGETS = (8, 12)
TOKENS = 24  # of an answer
BASE = "base"  # the served name of the model without memory


@dataclass(frozen=True)
class Answer:
    tokens: list[str]
    logprobs: list[float]


Content = str  # a digest; BASE for the model without memory
References = Mapping[tuple[Content, int], Answer]  # by content and question


def make_contents(model: Path, tasks: Path, work: Path) -> dict[str, Path]:
    """Eight bundles by digest: merged memories of two sizes, and decoupled ones of the same entries."""
    paths = []
    for budget in BUDGETS:
        folder = work / f"B{budget}"
        folder.mkdir()
        (merged,) = build_bundles(model, tasks, [budget], "prior", folder).values()
        paths += [merged, *decouple(merged, folder).values()]
    assert len(paths) == len(BUDGETS) * (1 + len(ACTIVATIONS))
    return {read_bundle(path).digest: path for path in paths}


def make_questions(count: int, seed: int = 0) -> list[list[Message]]:
    """Questions about random pictures."""
    rng = np.random.default_rng(seed)
    texts = ("What colour is the circle?", "How many squares are there?", "Which guild owns the red circle?")
    return [
        [user_turn(rng.integers(0, 256, (48, 48, 3), dtype=np.uint8), f"{texts[i % len(texts)]} ({i})")]
        for i in range(count)
    ]


def body(model: str, messages: list[Message]) -> dict[str, Any]:
    """A greedy request that tells its tokens' log-probabilities, and with a memory, whose it was."""
    request = {"model": model, "messages": messages, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    request |= {"logprobs": True, "return_tokens_as_token_ids": True}
    return request | ({} if model == BASE else {"vllm_xargs": {"inducekv_trace": 1}})


def answer_of(response: Mapping[str, Any]) -> Answer:
    steps = response["choices"][0]["logprobs"]["content"]
    return Answer([step["token"] for step in steps], [step["logprob"] for step in steps])


async def ask_alone(
    client: httpx.AsyncClient, questions: Sequence[list[Message]], names: Mapping[str, Content]
) -> dict[tuple[Content, int], Answer]:
    """Every question of every name that stands for a content, one after the other."""
    found = {}
    for name, content in names.items():
        for number, question in enumerate(questions):
            response = await client.post("/v1/chat/completions", json=body(name, question))
            response.raise_for_status()
            found[content, number] = answer_of(response.json())
    return found
