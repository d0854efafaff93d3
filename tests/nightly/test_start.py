"""A server that cannot begin ends, and says why: what ends it is vLLM's own."""

from pathlib import Path

import pytest

from benchmarks.server_process import ServerFailed, serving
from tests.engine.parity import FEWER_PROCESSES, World
from tests.server.launch import ENVIRONMENT, FLAGS


@pytest.mark.slow
def test_a_server_that_must_not_start_ends_and_its_log_names_the_reason(world: World, tmp_path: Path) -> None:
    worker = ["--worker-cls", "vllm.v1.worker.cpu_worker.CPUWorker"]
    arguments = [str(world.model), f"--memory=m={world.paths['first']}", *FLAGS, *worker]
    with (
        pytest.raises(ServerFailed, match="add --worker-cls"),
        serving(arguments, tmp_path / "log", {**ENVIRONMENT, **FEWER_PROCESSES}),
    ):
        pass
