"""Where the time to the first token goes, for requests with memory: the server's own timings of its steps."""

from __future__ import annotations

import time
from collections import defaultdict
from statistics import median

import httpx

from benchmarks.serving.load import REQUEST_SECONDS, chat_body
from benchmarks.serving.methods import BASE_METHOD, Method


def measure(url: str, methods: list[Method], rounds: int) -> dict[str, dict[str, float]]:
    """Median milliseconds a step, over one-token requests sent one by one, the methods in turn.

    `total_ms` is the client's; the steps are the server's, and the rest of the total is HTTP, chat template and image
    processing.
    """
    by_method: dict[str, dict[str, list[float]]] = {}
    traced = [
        method
        for method in methods
        if method.follow_up is None and method.name.startswith((BASE_METHOD, "memory_", "decoupled_"))
    ]
    with httpx.Client(base_url=url, timeout=REQUEST_SECONDS) as client:
        for _ in range(rounds):
            for method in traced:
                steps = by_method.setdefault(method.name, defaultdict(list))
                for step, value in _traced_request(client, method).items():
                    steps[step].append(value)
    return {name: {step: median(values) for step, values in steps.items()} for name, steps in by_method.items()}


def _traced_request(client: httpx.Client, method: Method) -> dict[str, float]:
    has_memory = method.name != BASE_METHOD
    xargs = method.xargs | ({"inducekv_trace": 1} if has_memory else {})
    body = chat_body(method.model, method.messages(), 1, xargs) | {"stream": False}
    del body["stream_options"]
    start = time.perf_counter()
    reply = client.post("/v1/chat/completions", json=body).raise_for_status().json()
    total = {"total_ms": 1000 * (time.perf_counter() - start)}
    if not has_memory:
        return total
    timings = reply["kv_transfer_params"]["inducekv"]["timings"]
    assert timings["key_source"] == "computed", "a prompt was not unique: its key came from the cache"
    return total | {step: value for step, value in timings.items() if step.endswith("_ms")}
