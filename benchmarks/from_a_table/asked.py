"""Two servers are asked over HTTP: which answers are right, and how long the first token takes."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from random import Random
from typing import Any

import httpx

from benchmarks.chat import Message, chat_body, messages_of
from benchmarks.exemplars import KEYS, Exemplars, Neighbours, conversation
from benchmarks.from_a_table.learned import BASE, Learned
from benchmarks.lora_adapter import served_rank
from benchmarks.server_process import serving
from selector.backbone.model import Backbone
from selector.backbone.scoring import Scorer
from selector.cli.asking import served_answers, served_decisions
from selector.data.anchors import AnchorStore
from selector.data.examples import Example

Plan = Callable[[Sequence[Example]], list[Example]]  # from questions to conversations
MAX_TOKENS = 16
SECONDS = 600.0
WITHOUT_ADAPTER = "untouched, LoRA server"
FLAGS = ("--served-model-name", BASE, "--dtype", "float32", "--max-model-len", "2048", "--max-num-seqs", "8")
# vLLM takes most of a machine's memory for one server otherwise.
ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "0"}


def ask_all(
    model: Path,
    ways: Sequence[Learned],
    questions: Sequence[Example],
    base: Sequence[Example],
    lengths: Sequence[int],
    rounds: int,
    work: Path,
    serve_args: Sequence[str] = (),
) -> tuple[dict[str, dict[str, Any]], list[dict[str, Any]]]:
    """Of each way what it gets right, and rows of times to first token by length of the question."""
    backbone = Backbone.load(model)
    plans = {way.name: plan(way, backbone) for way in ways}
    adapters = [way for way in ways if way.artifact.kind == "adapter"]
    others = [way for way in ways if way.artifact.kind != "adapter"]
    found: dict[str, dict[str, Any]] = {}
    times: list[dict[str, Any]] = []
    for log, flags, served in (("memory", memory_flags(others), others), ("lora", lora_flags(adapters), adapters)):
        if not served:
            continue
        with serving([str(model), *FLAGS, *flags, *serve_args], work / f"{log}.log", ENVIRONMENT) as url:
            for way in served:
                asked = {"right": questions, "base_right": base}
                found[way.name] = {key: right(url, way, plans[way.name], of) for key, of in asked.items() if of}
            names = {way.name: (way.served_as, plans[way.name]) for way in served}
            if log == "lora":
                names = {WITHOUT_ADAPTER: (BASE, plans[adapters[0].name]), **names}
            times += first_tokens(url, names, long_questions(backbone, questions, lengths, rounds, len(names)))
    return found, times


def plan(way: Learned, backbone: Backbone) -> Plan:
    """A question as it is, or with retrieved rows before it."""
    if way.artifact.kind != "exemplars":
        return list
    rows = tuple(AnchorStore(way.path).read())
    stored = Exemplars(Scorer(backbone), Neighbours.read(way.folder / KEYS), rows, MAX_TOKENS)
    return lambda questions: [conversation(*each) for each in zip(stored.before(questions), questions, strict=True)]


def memory_flags(ways: Iterable[Learned]) -> list[str]:
    """A bundle is a model's name."""
    bundles = [f"{way.served_as}={way.path}" for way in ways if way.artifact.kind == "bundle"]
    return [part for bundle in bundles for part in ("--memory", bundle)]


def lora_flags(ways: Sequence[Learned]) -> list[str]:
    folders = {way.served_as: way.path for way in ways}
    ranks = [json.loads((folder / "adapter_config.json").read_bytes())["r"] for folder in folders.values()]
    modules = [f"{name}={folder}" for name, folder in folders.items()]
    rank = served_rank(max(ranks, default=1), "an adapter")
    return ["--enable-lora", "--max-lora-rank", str(rank), "--max-loras", "2", "--lora-modules", *modules]


def right(url: str, way: Learned, how: Plan, questions: Sequence[Example]) -> int:
    """How many answers are right to the letter, but for space around them."""
    said = served_answers(url, way.served_as, how(questions), MAX_TOKENS)
    return sum(answer.text.strip() == each.answer.strip() for answer, each in zip(said, questions, strict=True))


def long_questions(
    backbone: Backbone, questions: Sequence[Example], lengths: Sequence[int], rounds: int, ways: int
) -> list[tuple[int, list[Example]]]:
    """(tokens, a question for each way): one that warms up, then each length `rounds` times, in turns.

    No two questions are alike: the second to ask one would find its prompt in the prefix cache.

    A question grows by what the others say after the words that all begin with, until its whole prompt has as many
    tokens.
    """
    rng = Random(0)
    texts = [text_of(each) for each in questions]
    shared = sum(1 for _ in takewhile(lambda signs: len(set(signs)) == 1, zip(*texts, strict=False)))

    def asking(text: str) -> Example:
        message = {"role": "user", "content": [{"type": "text", "text": text}]}
        return Example("long", questions[0].task, (message,), (), "", text)

    def long(length: int) -> Example:
        text = texts[rng.randrange(len(texts))]
        while backbone.encode_example(asking(text))["input_ids"].shape[1] < length:
            text += " " + texts[rng.randrange(len(texts))][shared:]
        return asking(text)

    order = [lengths[0], *list(lengths) * rounds]
    return [(length, [long(length) for _ in range(ways)]) for length in order]


def text_of(example: Example) -> str:
    return "".join(part["text"] for part in example.messages[-1]["content"] if part["type"] == "text")


def first_tokens(
    url: str, ways: Mapping[str, tuple[str, Plan]], questions: Sequence[tuple[int, list[Example]]]
) -> list[dict[str, Any]]:
    """Medians of each way and length, without the first question of each way; the ways take turns."""
    seconds: dict[tuple[str, int], list[float]] = {}
    sizes: dict[tuple[str, int], list[int]] = {}
    opened: dict[tuple[str, int], list[bool]] = {}
    for number, (length, own) in enumerate(questions):
        for (name, (model, how)), question in zip(ways.items(), own, strict=True):
            (asked,) = how([question])
            taken, tokens = first_token(url, model, messages_of(asked))
            if number:
                seconds.setdefault((name, length), []).append(taken)
                sizes.setdefault((name, length), []).append(tokens)
                if name.startswith("memory"):
                    (decision,) = served_decisions(url, model, [question])  # its prompt is in the prefix cache by now
                    opened.setdefault((name, length), []).append(decision.task is not None)
    return [
        {
            "way": name,
            "length": length,
            "prompt_tokens": round(statistics.median(sizes[name, length])),
            "requests": len(taken),
            "ttft_ms": round(1000 * statistics.median(taken), 1),
            **({"opened": sum(opened[name, length])} if (name, length) in opened else {}),
        }
        for (name, length), taken in seconds.items()
    ]


def first_token(url: str, model: str, messages: list[Message]) -> tuple[float, int]:
    """Seconds until the first token's chunk is there, and the prompt's tokens."""
    body, began = chat_body(model, messages, 2, {}), time.perf_counter()
    taken, usage = None, {}
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=SECONDS) as response:
        response.raise_for_status()
        for line in response.iter_lines():
            chunk = json.loads(line.removeprefix("data: ")) if line.startswith("data: {") else {}
            if taken is None and any(choice.get("token_ids") for choice in chunk.get("choices", ())):
                taken = time.perf_counter() - began
            usage = chunk.get("usage") or usage
    assert taken is not None, "no token came"
    return taken, usage["prompt_tokens"]
