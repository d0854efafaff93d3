"""Servers that must not start: each ends, and the end of its log names the reason."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest

from benchmarks.server_process import ServerFailed, starting
from inducekv_vllm.bundle import write_bundle
from tests.inducekv_vllm.bundles import random_bundle
from tests.inducekv_vllm.parity import FEWER_PROCESSES, World
from tests.server.launch import ENVIRONMENT, FLAGS


def test_the_reason_is_named(world: World, tmp_path: Path) -> None:
    foreign = tmp_path / "foreign.safetensors"
    write_bundle(random_bundle(), foreign)
    servers = {
        "add --worker-cls": (world.paths["sqrt"], ["--worker-cls", "vllm.v1.worker.cpu_worker.CPUWorker"]),
        "was made for another backbone: .*hidden_size": (foreign, []),
    }
    with ExitStack() as stack:  # at the same time
        starts = {}
        for number, (reason, (bundle, flags)) in enumerate(servers.items()):
            arguments = [str(world.model), f"--memory=m={bundle}", *FLAGS, *flags]
            environment = {**ENVIRONMENT, **FEWER_PROCESSES}
            starts[reason] = stack.enter_context(starting(arguments, tmp_path / f"log-{number}", environment))
        for reason, wait_until_healthy in starts.items():
            with pytest.raises(ServerFailed, match=f"(?s){reason}"):
                wait_until_healthy()
