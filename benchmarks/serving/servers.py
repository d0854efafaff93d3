"""Three servers of one model at the same time: vLLM without plugins, with the plugin, and with a LoRA adapter."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.lora_adapter import served_rank
from benchmarks.server_process import ServerFailed, starting
from benchmarks.serving.files import Files
from benchmarks.serving.methods import BASE, LORA, SERVERS, Server

VLLM = "vllm.entrypoints.openai.api_server"
LEAST_POOL_ENTRIES = 128


@dataclass(frozen=True)
class Command:
    """How a server is started."""

    module: str
    arguments: list[str]
    environment: dict[str, str]


def commands(files: Files, lora_rank: int, shared: list[str], work: Path) -> dict[Server, Command]:
    """Of each server; `shared` are flags of all three."""
    memories = [part for name, path in files.bundles.items() for part in ("--memory", f"{name}={path}")]
    memories += ["--memory-pool-entries", str(max(2 * files.entries, LEAST_POOL_ENTRIES))]  # room for as many more
    rank = str(served_rank(lora_rank, "--lora-rank"))
    lora = ["--enable-lora", "--max-loras", "1", "--max-lora-rank", rank, "--lora-modules", f"{LORA}={files.adapter}"]
    plain = ["--model", str(files.model)]
    flags = ["--served-model-name", BASE, "--uvicorn-log-level", "warning", *shared]
    # They start at the same time, and would write the same compiled files.
    caches = {name: {"VLLM_CACHE_ROOT": str(work / f"cache-{name}")} for name in SERVERS}
    return {
        "plain": Command(VLLM, [*plain, *flags], caches["plain"] | {"VLLM_PLUGINS": ""}),
        "plugin": Command("server.launcher", [str(files.model), *memories, *flags], caches["plugin"]),
        "lora": Command(VLLM, [*plain, *lora, *flags], caches["lora"] | {"VLLM_PLUGINS": ""}),
    }


@contextmanager
def side_by_side(
    starts: Mapping[Server, Command], logs: Path, seconds: float
) -> Iterator[tuple[dict[Server, str], dict[Server, str]]]:
    """Start all, and yield the addresses of those that are healthy in time and the reasons of the others.

    Raises:
        ServerFailed: none is.
    """
    deadline = time.monotonic() + seconds
    with ExitStack() as stack:
        waits = {}
        for name, each in starts.items():
            log = logs / f"server-{name}.log"
            waits[name] = stack.enter_context(starting(each.arguments, log, each.environment, each.module))
        urls, failed = dict[Server, str](), dict[Server, str]()
        for name, wait in waits.items():
            try:
                urls[name] = wait(max(deadline - time.monotonic(), 1.0))
            except ServerFailed as error:
                failed[name] = str(error)
        if not urls:
            raise ServerFailed("\n\n".join(f"{name}: {why}" for name, why in failed.items()))
        yield urls, failed
