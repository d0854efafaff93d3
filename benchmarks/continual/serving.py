"""The servers that answer a run's questions over HTTP: the run's own, or endpoints that the user names.

A server with LoRA is slower, and must not serve the untouched model (see `Endpoints`): adapters have a server of their
own. Only the servers that the methods need are started.
"""

from __future__ import annotations

import os
import secrets
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.continual.answering.endpoint import LOAD_ROUTES, LOADS, Endpoint, EndpointFailed, Loadable
from benchmarks.continual.answering.http import Endpoints
from benchmarks.continual.methods import Method
from benchmarks.continual.suites import Suite
from benchmarks.lora_adapter import attach, largest_rank, memory_bytes, save, served_rank
from benchmarks.server_process import starting
from inducekv_vllm.bundle import write_bundle
from inducekv_vllm.errors import ConfigError
from inducekv_vllm.host.config import ADMIN_KEY_VARIABLE
from selector.backbone.model import Backbone
from selector.update.build import build_bundle
from selector.update.settings import BuildSettings

SERVED_NAME = "untouched"
# The worker runs in the process of its engine: one of its own would wait for work in a loop that takes a core.
NO_IDLE_WORKER = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
# By default vLLM takes most of a machine's memory for one server on a CPU; a run may have two, and trains beside them.
KV_CACHE_GIB = {"VLLM_CPU_KVCACHE_SPACE": "2"}
PAYLOAD_TOKENS = 8  # m of a memory, if a method has no setting of that name


@dataclass(frozen=True)
class Needs:
    """What a run needs of its servers."""

    model: Path
    suite: Suite
    methods: Sequence[Method]
    budget: int  # the largest
    jobs: int  # streams that ask at the same time

    def users_of(self, what: Loadable) -> list[str]:
        """The methods whose artifacts are loaded in this way."""
        return [method.name for method in self.methods if LOADS[method.kind] == what]

    @property
    def plain(self) -> bool:
        """Whether anything but adapters answers: all methods but ungated adapters also ask the untouched model."""
        return any(method.kind != "adapter" for method in self.methods)

    @property
    def rank(self) -> int:
        """The largest rank whose bytes are no more than those of the largest memory."""
        tokens = max(getattr(method, "payload_tokens", PAYLOAD_TOKENS) for method in self.methods)
        backbone = Backbone.load(self.model)
        allowed = memory_bytes(backbone, self.budget, tokens, len(self.suite.tasks))
        modules = {getattr(method, "modules", "all") for method in self.methods}
        return max(largest_rank(backbone, allowed, each) for each in modules)


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
def own_servers(needs: Needs, out: Path, logs: Path, more: Sequence[str] = ()) -> Iterator[Endpoints]:
    """Servers of the run's model on free local ports, ended with the context; their logs go into the folder `logs`.

    They load what lies in the run's folder `out`. Flags in `more` come last and win. Raises ServerFailed; ConfigError:
    no server could take the run's adapters.
    """
    with ExitStack() as stack:
        stack.enter_context(admin_key())

        def start(log: str, arguments: Sequence[str], environment: dict[str, str]) -> Callable[[], str]:
            flags = [str(needs.model), "--memory-root", str(out), *server_flags(), *arguments, *more]
            everything = {**KV_CACHE_GIB, **os.environ, **NO_IDLE_WORKER, **environment}
            return stack.enter_context(starting(flags, logs / log, everything))

        adapters = start("server-lora.log", *lora_flags(needs)) if needs.users_of("adapter") else None
        plain = start("server.log", (), {}) if needs.plain or adapters is None else adapters
        # Both start at the same time.
        plain_url, adapters_url = plain(), (adapters or plain)()
        yield Endpoints(Endpoint(plain_url, SERVED_NAME), Endpoint(adapters_url, SERVED_NAME))


def server_flags() -> list[str]:
    """float32, in which answers are compared; not compiled, which would take longer than most runs of a small model."""
    precision = ["--dtype", "float32", "--enforce-eager"]
    return [*precision, "--served-model-name", SERVED_NAME, "--max-num-seqs", "32", "--disable-uvicorn-access-log"]


def lora_flags(needs: Needs) -> tuple[list[str], dict[str, str]]:
    """Arguments and environment. Raises ConfigError: vLLM serves no adapter of that rank."""
    served = served_rank(needs.rank, f"an adapter of budget {needs.budget}")
    flags = ["--enable-lora", "--max-lora-rank", str(served), "--max-loras", str(max(2, needs.jobs))]
    return flags, {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}


def given_endpoints(urls: Sequence[str], model: str | None, needs: Needs, out: Path) -> Endpoints:
    """For bundles and adapters, the first endpoint that loads them from the run's folder. Raises ConfigError: none."""
    endpoints = [Endpoint.at(url, model) for url in urls]
    adapters = _first_that_loads("adapter", endpoints, needs, out) if needs.users_of("adapter") else endpoints[0]
    plain = _first_that_loads("bundle", endpoints, needs, out) if needs.users_of("bundle") else endpoints[0]
    return Endpoints(plain, adapters)


def _first_that_loads(what: Loadable, endpoints: Sequence[Endpoint], needs: Needs, out: Path) -> Endpoint:
    reasons = []
    with tempfile.TemporaryDirectory(dir=out) as folder:
        sample = save_sample(what, needs, Path(folder))
        for endpoint in endpoints:
            if not endpoint.offers(what):
                reasons.append(f"{endpoint.url} has no such route")
                continue
            try:
                endpoint.unload(what, endpoint.load(what, sample))
                return endpoint
            except EndpointFailed as error:
                reasons.append(str(error))
    raise ConfigError(
        f"{', '.join(needs.users_of(what))}: the answers need an endpoint that loads what was learned "
        f"(POST {LOAD_ROUTES[what]}): {'; '.join(reasons)}. Without --endpoint the run starts a server of its own"
    )


def save_sample(what: Loadable, needs: Needs, folder: Path) -> Path:
    """A memory of one entry, or a new adapter of rank 1, for a trial load."""
    backbone = Backbone.load(needs.model)
    if what == "adapter":
        save(attach(backbone, 1, seed=0), folder / "adapter")
        return folder / "adapter"
    example = needs.suite.tasks[0].train[0]
    write_bundle(build_bundle(backbone, [example], BuildSettings(budget=1)), folder / "sample.safetensors")
    return folder / "sample.safetensors"
