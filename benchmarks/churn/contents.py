"""The contents of the bundles, and what each answers when it is asked alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from benchmarks.chat import Message, question_of, user_turn
from benchmarks.demo.world import examples
from benchmarks.random_bundles import bundle_of, random_entries
from inducekv_vllm.backbone.fingerprint import backbone_fingerprint
from inducekv_vllm.bundle import Bundle, write_bundle
from inducekv_vllm.bundle.activation import Activation

PAYLOAD_TOKENS = 8
TOKENS = 24  # of an answer
BASE = "base"  # the served name of the model without memory


@dataclass(frozen=True)
class Answer:
    tokens: list[str]
    logprobs: list[float]


Content = str  # a digest; BASE for the model without memory
References = Mapping[tuple[Content, int], Answer]  # by content and question


def make_contents(model: Path, work: Path) -> dict[Content, Path]:
    """Bundles of random entries: two of both forms, one with its later version, which shares two thirds of the
    entries, and two more of both forms.
    """
    backbone = backbone_fingerprint(model)
    a, b, c = (random_entries(backbone, count, PAYLOAD_TOKENS, seed=count) for count in (8, 12, 10))
    for tensors in (a, b, c):
        tensors["payload_values"] *= 100  # no two contents are to give the same answer
    later = b | {"payload_values": b["payload_values"].clone()}
    later["payload_values"][:, ::3] *= 0.75
    merged, first, second, other = (bundle_of(backbone, tensors) for tensors in (a, b, later, c))
    bundles = (merged, _decoupled(other, "prompt"), first, second, other, _decoupled(merged, "text"))
    paths = {bundle.digest: work / f"{bundle.digest:.12}.safetensors" for bundle in bundles}
    for bundle in bundles:
        write_bundle(bundle, paths[bundle.digest])
    return paths


def _decoupled(merged: Bundle, activation: Activation) -> Bundle:
    facts = {name: getattr(merged.metadata, name) for name in ("backbone", "budget", "entries", "recipe", "settings")}
    activations = dict.fromkeys(merged.metadata.tasks, activation)
    return Bundle.create(**merged.tensors(), **facts, weighting="uniform", form="decoupled", activations=activations)


def make_questions(count: int) -> list[list[Message]]:
    return [[user_turn(pixels, question_of(record))] for record, pixels in examples("guild", "test", count)]


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
