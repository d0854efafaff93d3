"""Questions of a running server, and how a table shows what came back: shared by the demonstrations."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
from rich.console import Console
from rich.markup import escape

from benchmarks.chat import Message, same_answer
from benchmarks.server_process import serving

SHOWN_ENTRIES = 3
MAX_TOKENS = 16
# By default vLLM takes a share of the machine's memory on a CPU, and does not start where others have that memory.
KV_CACHE_GIB = "VLLM_CPU_KVCACHE_SPACE"


@dataclass(frozen=True)
class Reply:
    text: str
    seconds: float
    trace: dict[str, Any] | None  # the server's report on retrieval, for a request that used memory


@contextmanager
def served(model: Path, bundle: Path, arguments: Sequence[str], console: Console) -> Iterator[openai.OpenAI]:
    """A client of a server of `arguments`. Raises ServerFailed: it does not start."""
    console.print(f"starting inducekv-serve on {model} with {bundle} ...")
    start = time.perf_counter()
    environment = {KV_CACHE_GIB: os.environ.get(KV_CACHE_GIB, "1")}
    with tempfile.TemporaryDirectory() as folder, serving(arguments, Path(folder) / "server.log", environment) as url:
        console.print(f"serving at {url} after {time.perf_counter() - start:.0f} s")
        yield openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


def ask(client: openai.OpenAI, model: str, messages: Sequence[Message], *, trace: bool) -> Reply:
    start = time.perf_counter()
    response = client.chat.completions.create(
        model=model,
        messages=messages,  # type: ignore[arg-type]
        temperature=0.0,
        max_tokens=MAX_TOKENS,
        extra_body={"vllm_xargs": {"inducekv_trace": 1}} if trace else None,
    )
    seconds = time.perf_counter() - start
    extra = response.model_extra or {}
    report = (extra.get("kv_transfer_params") or {}).get("inducekv") if trace else None
    return Reply((response.choices[0].message.content or "").strip(), seconds, report)


def base_model(client: openai.OpenAI, bundle: str) -> str:
    """The name of the untouched model beneath a bundle."""
    models = list(client.models.list())
    memory = next(model for model in models if model.id == bundle)
    return next(model.id for model in models if model.id == (memory.model_extra or {})["parent"])


def marked(text: str, answer: str) -> str:
    """Green if it is right, else red."""
    return f"[{'green' if same_answer(text, answer) else 'red'}]{escape(text) or '(nothing)'}[/]"


def gate_is_open(trace: dict[str, Any]) -> bool:
    """Whether the request got memory; a memory without a gate always does."""
    return trace["gate"] is None or bool(trace["gate"]["open"])


def entries(trace: dict[str, Any]) -> str:
    """The entries that the request used most."""
    if not gate_is_open(trace):
        return "none: the gate is closed"
    by_weight = sorted(trace["entries"], key=lambda entry: -entry["weight"])
    most_used = [f"{entry['id']} ({entry['weight']:.3f})" for entry in by_weight[:SHOWN_ENTRIES]]
    return "\n".join([*most_used, f"of {len(by_weight)}"])


def times(plain: Reply, memory: Reply) -> str:
    """Milliseconds of both requests, and of each step of the second."""
    assert memory.trace is not None
    steps = {name.removesuffix("_ms"): value for name, value in memory.trace["timings"].items() if name.endswith("_ms")}
    passes = [f"  {name.replace('_', ' ')} {value:.2f}" for name, value in steps.items()]
    return "\n".join([f"no memory {1000 * plain.seconds:.1f}", f"memory {1000 * memory.seconds:.1f}", *passes])
