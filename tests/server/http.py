"""Shared by the HTTP tests: requests, responses and the memory routes."""

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai

from inducekv_vllm.bundle import Bundle
from inducekv_vllm.vllm_seams.config import ADMIN_HEADER
from selector.client import Server
from tests.engine.parity import Prompt, World, largest_deviation
from tests.server.launch import ADMIN_KEY

TRACED = {"vllm_xargs": {"inducekv_trace": 1}}


def alone(model: str) -> dict[str, Any]:
    """`extra_body` of a request that has its model's memory and none that others share."""
    return {"vllm_xargs": {"inducekv_trace": 1, "inducekv_memories": [model]}}


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
    """`largest_deviation` of one choice."""
    return largest_deviation(world, prompt, *tokens_and_logprobs(response, choice), bundle, top_k=top_k)


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


def trace_at(url: str, response_id: str, key: str = "none") -> httpx.Response:
    """The trace of a response that a client with this API key got."""
    return httpx.get(f"{url.rstrip('/')}/memory_trace/{response_id}", headers={"Authorization": f"Bearer {key}"})


class Bundles:
    """The memory routes of a server, for its admin; `load` and `unload` give the answer, whatever its status."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.headers = {ADMIN_HEADER: ADMIN_KEY}
        self.server = Server(url, admin_key=ADMIN_KEY)

    def load(self, name: str, path: Path | str, **options: Any) -> httpx.Response:
        body = {"name": name, "path": str(path), **options}
        return httpx.post(f"{self.url}/v1/load_memory_bundle", json=body, headers=self.headers, timeout=60)

    def unload(self, name: str) -> httpx.Response:
        url = f"{self.url}/v1/unload_memory_bundle"
        return httpx.post(url, json={"name": name}, headers=self.headers, timeout=60)

    def list(self) -> dict[str, Any]:
        return self.server.call("GET", "memory_bundles", as_admin=True)

    def cards(self) -> dict[str, dict[str, Any]]:
        """By name."""
        return {card["name"]: card for card in self.list()["data"]}

    @contextmanager
    def loaded(self, name: str, path: Path | str) -> Iterator[None]:
        """`name` stands for this bundle, and at the end, for none; then nothing may be left of it."""
        self.server.load(name, path, replace=False)
        yield
        self.server.unload(name)
        self.wait_until_drained()

    def wait_until_drained(self) -> None:
        wait_until(lambda: not self.list()["draining"])


def wait_until(condition: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)


def preemptions(server: str) -> float:
    metrics = httpx.get(f"{server}/metrics", timeout=60).text
    return sum(map(float, re.findall(r"^vllm:num_preemptions_total{.*} (\S+)$", metrics, re.MULTILINE)))
