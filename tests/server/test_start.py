"""Servers that must not start: each ends, and its last words name the reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.server_process import ServerFailed, serving
from inducekv_vllm.bundle import write_bundle
from tests.inducekv_vllm.bundles import random_bundle
from tests.inducekv_vllm.parity import World
from tests.server.launch import ENVIRONMENT, FLAGS


@pytest.mark.parametrize(
    ("foreign", "flags", "reason"),
    [
        (False, ["--worker-cls", "vllm.v1.worker.cpu_worker.CPUWorker"], "add --worker-cls"),
        (True, [], "was made for another backbone: .*hidden_size"),
    ],
    ids=["without the worker", "with a bundle of another backbone"],
)
def test_the_reason_is_named(world: World, tmp_path: Path, foreign: bool, flags: list[str], reason: str) -> None:
    bundle = world.paths["sqrt"]
    if foreign:
        bundle = tmp_path / "foreign.safetensors"
        write_bundle(random_bundle(), bundle)
    arguments = [str(world.model), f"--memory=m={bundle}", *FLAGS, *flags]
    with pytest.raises(ServerFailed, match=f"(?s){reason}"), serving(arguments, tmp_path / "log", ENVIRONMENT):
        pass
