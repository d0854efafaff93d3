"""What a launch takes of the host, without a GPU: `python -m benchmarks.kernels.launching [--geometry qwen3-vl-4b]`.

The kernel is compiled for a GPU that is not there, whose driver drops what is launched. `triton` is Triton's own
launch, `kernel[grid](...)`; `launch` is `kernels.launch.add_memory`. Both take the same arguments by turns, and pass on
the same. It prints microseconds, medians over rounds, and their ratio. A prompt's pass makes
such a launch in each layer; where a CUDA graph is replayed, nothing is launched.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget

from benchmarks.geometries import GEOMETRIES
from benchmarks.kernels.compiled import GPUS
from benchmarks.kernels.workloads import Case, build
from benchmarks.record import keep, parser_of
from inducekv_vllm.attention.kernels import device, launch

CAPABILITY = 90
ROUNDS, CALLS = 15, 200


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--geometry", choices=sorted(GEOMETRIES), default="qwen3-vl-4b")
    args = parser.parse_args()
    if launch.INTERPRETED:
        parser.error("nothing is launched with TRITON_INTERPRET=1")
    without_gpu(lambda *_: None)
    case = Case("prefill", 256, 4, "decoupled")
    workload = build(case, GEOMETRIES[args.geometry], torch.bfloat16, "cpu", processors=GPUS[CAPABILITY])
    given = (workload.pools[0], workload.tables, workload.step, workload.query, workload.self_output, None)
    rest = given, workload.geometry.scale, workload.shape
    found = compared(*rest)
    keep({"benchmark": "launching", "geometry": args.geometry, "case": case.name, **found}, args.output)


def without_gpu(launched: Callable[..., object]) -> None:
    """Let Triton compile for a GPU that is not there, and launches call `launched` with its hash and what it is given.

    What profilers are told, which is made anew for each launch, is left out.
    """
    utils = SimpleNamespace(
        load_binary=lambda *_: ("module", "function", 64, 0, 1024),
        get_device_properties=lambda _: {"max_shared_mem": GPUS[CAPABILITY].shared_memory},
    )
    driver: Any = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", CAPABILITY, 32),
        get_current_device=lambda: 0,
        get_current_stream=lambda _: 7,
        launcher_cls=lambda _, metadata: lambda *given: launched(metadata.hash, *given[:6], *given[7:]),
        utils=utils,
    )
    triton.runtime.driver.set_active(driver)


def compared(tensors: Any, scale: float, shape: Any) -> dict[str, float]:
    """Microseconds of a launch, and their ratio."""
    grid = shape.programs, len(tensors[0].keys)

    def by_triton() -> None:
        device.memory_tiles[grid](**launch.arguments_of(*tensors, scale, shape))

    def by_launch() -> None:
        launch.add_memory(*tensors, scale, shape)

    ways = {"triton_us": by_triton, "launch_us": by_launch}
    for call in ways.values():
        call()
    rounds = [{name: microseconds(call) for name, call in ways.items()} for _ in range(ROUNDS)]
    found = {name: round(statistics.median(each[name] for each in rounds), 2) for name in ways}
    ratio = statistics.median(each["launch_us"] / each["triton_us"] for each in rounds)
    return found | {"ratio": round(ratio, 3)}


def microseconds(call: Callable[[], None]) -> float:
    start = time.perf_counter()
    for _ in range(CALLS):
        call()
    return 1e6 * (time.perf_counter() - start) / CALLS


if __name__ == "__main__":
    main()
