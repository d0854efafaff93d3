"""The servers that answer a run's questions over HTTP.

A server with LoRA is slower, and must not serve the untouched model (see `Endpoints`): adapters have a server of their
own. Only the servers that the methods need are started.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.lora_adapter import largest_rank, memory_bytes, served_rank
from benchmarks.research.continual.answering.http import LOADS, Endpoint, Endpoints
from benchmarks.research.continual.methods import Method
from benchmarks.research.continual.suites import Suite
from benchmarks.server_process import starting
from inducekv_vllm.vllm_seams.config import ADMIN_KEY_VARIABLE
from selector.backbone.model import Backbone

SERVED_NAME = "untouched"
# The worker runs in the process of its engine: one of its own would wait for work in a loop that takes a core.
NO_IDLE_WORKER = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
# By default vLLM takes most of a machine's memory for one server on a CPU; a run may have two, and trains beside them.
KV_CACHE_GIB = {"VLLM_CPU_KVCACHE_SPACE": "2"}
PAYLOAD_TOKENS = 8  # m of a memory, if a method has no setting of that name
# float32, in which answers are compared; not compiled, which would take longer than most runs of a small model.
SERVER_FLAGS = (
    *("--dtype", "float32", "--enforce-eager", "--served-model-name", SERVED_NAME, "--max-num-seqs", "32"),
    "--disable-uvicorn-access-log",
)


@dataclass(frozen=True)
class Needs:
    """What a run needs of its servers."""

    model: Path
    suite: Suite
    methods: Sequence[Method]
    budget: int  # the largest
    jobs: int  # streams that ask at the same time

    @property
    def adapters(self) -> bool:
        return any(LOADS[method.kind] == "adapter" for method in self.methods)

    @property
    def plain(self) -> bool:
        """Whether anything but adapters answers: all methods but ungated adapters ask the untouched model too,
        and those that change the model in the process ask no server."""
        return any(method.kind not in ("adapter", "attached") for method in self.methods)

    @property
    def rank(self) -> int:
        """The largest that is asked for, or whose bytes are no more than those of the largest memory."""
        tokens = max(getattr(method, "payload_tokens", PAYLOAD_TOKENS) for method in self.methods)
        backbone = Backbone.load(self.model)
        allowed = memory_bytes(backbone, self.budget, tokens, len(self.suite.tasks))
        modules = {getattr(method, "modules", "all") for method in self.methods}
        asked = [getattr(method, "rank", None) or 1 for method in self.methods]
        return max(*asked, *(largest_rank(backbone, allowed, each) for each in modules))


@contextmanager
def admin_key() -> Iterator[None]:
    """INDUCEKV_ADMIN_KEY is set, for servers and for those who load bundles into them, all in child processes."""
    if ADMIN_KEY_VARIABLE in os.environ:
        yield
        return
    os.environ[ADMIN_KEY_VARIABLE] = secrets.token_hex(16)
    try:
        yield
    finally:
        del os.environ[ADMIN_KEY_VARIABLE]


@contextmanager
def own_servers(needs: Needs, out: Path, more: Sequence[str] = ()) -> Iterator[Endpoints]:
    """Servers of the run's model on free local ports, ended with the context.

    They load what lies in the run's folder `out`, and write their logs there. Flags in `more` come last and win. Raises
    ServerFailed; ConfigError: no server could take the run's adapters.
    """
    with ExitStack() as stack:
        stack.enter_context(admin_key())

        def start(log: str, arguments: Sequence[str], environment: dict[str, str]) -> Callable[[], str]:
            flags = [str(needs.model), "--memory-root", str(out), *SERVER_FLAGS, *arguments, *more]
            everything = {**KV_CACHE_GIB, **os.environ, **NO_IDLE_WORKER, **environment}
            return stack.enter_context(starting(flags, out / log, everything))

        adapters = start("server-lora.log", *lora_flags(needs)) if needs.adapters else None
        plain = start("server.log", (), {}) if needs.plain or adapters is None else adapters
        # Both start at the same time.
        plain_url, adapters_url = plain(), (adapters or plain)()
        yield Endpoints(Endpoint(plain_url, SERVED_NAME), Endpoint(adapters_url, SERVED_NAME))


def lora_flags(needs: Needs) -> tuple[list[str], dict[str, str]]:
    """Arguments and environment. Raises ConfigError: vLLM serves no adapter of that rank."""
    served = served_rank(needs.rank, f"an adapter of budget {needs.budget}")
    flags = ["--enable-lora", "--max-lora-rank", str(served), "--max-loras", str(max(2, needs.jobs))]
    return flags, {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
