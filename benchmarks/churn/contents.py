"""The contents of the bundles, and what each answers when it is asked alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from benchmarks.chat import Message, user_turn
from benchmarks.random_bundles import bundle_of, random_entries
from benchmarks.serving.bundles import build_bundles, decouple
from benchmarks.serving.methods import decoupled_name
from inducekv_vllm.bundle import Bundle, read_bundle, write_bundle
from inducekv_vllm.fingerprint import backbone_fingerprint

BUDGETS = (8, 12)
PAYLOAD_TOKENS = 8  # of a random entry
TOKENS = 24  # of an answer
BASE = "base"  # the served name of the model without memory


@dataclass(frozen=True)
class Answer:
    tokens: list[str]
    logprobs: list[float]


Content = str  # a digest; BASE for the model without memory
References = Mapping[tuple[Content, int], Answer]  # by content and question


@dataclass
class Contents:
    """What the names stand for; both of a pair take turns."""

    kept: tuple[Content, Content]  # merged and decoupled memory, of the two names that stay
    replaced: tuple[Content, Content]  # the later version shares two thirds of the entries
    reloaded: tuple[Content, Content]  # nothing shared, and another form
    large: tuple[Content, Content]  # nothing shared; never asked
    paths: dict[Content, Path]

    @property
    def asked(self) -> list[Content]:
        return [*self.kept, *self.replaced, *self.reloaded]


def make_contents(model: Path, tasks: Path, work: Path, large: int) -> Contents:
    """Eight bundles of examples of these tasks, two of them of so many random entries."""
    paths: dict[Content, Path] = {}

    def known(path: Path) -> Content:
        digest = read_bundle(path).digest
        paths[digest] = path
        return digest

    eight, twelve = (work / f"B{budget}" for budget in BUDGETS)
    built = []
    for folder, budget in ((eight, BUDGETS[0]), (twelve, BUDGETS[1])):
        folder.mkdir()
        built += build_bundles(model, tasks, [budget], "prior", folder).values()
    of_eight, of_twelve = built
    decoupled = decouple(of_twelve, twelve)
    backbone, random = backbone_fingerprint(model), [work / f"large-{seed}.safetensors" for seed in range(2)]
    for seed, path in enumerate(random):
        write_bundle(bundle_of(backbone, random_entries(backbone, large, PAYLOAD_TOKENS, seed)), path)
    found = Contents(
        kept=(known(of_eight), known(decoupled[decoupled_name("prompt")])),
        replaced=(known(of_twelve), known(_changed(of_twelve, 3, twelve / "later.safetensors"))),
        reloaded=(
            known(_changed(of_eight, 1, eight / "other.safetensors")),
            known(_changed(decoupled[decoupled_name("text")], 1, twelve / "other.safetensors")),
        ),
        large=(known(random[0]), known(random[1])),
        paths=paths,
    )
    assert len(paths) == 2 * 4
    return found


def _changed(path: Path, every: int, output: Path) -> Path:
    """Write the bundle with other values in every so-manieth entry."""
    bundle = read_bundle(path)
    values = bundle.payload_values.clone()
    values[:, ::every] *= 0.75
    facts = ("backbone", "budget", "entries", "weighting", "recipe", "settings", "form", "activations")
    kept = {name: getattr(bundle.metadata, name) for name in facts}
    write_bundle(Bundle.create(**bundle.tensors() | {"payload_values": values}, **kept), output)
    return output


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
