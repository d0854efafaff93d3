"""Compiles the kernels for a GPU that is not there: `python -m benchmarks.kernels.compiled --geometry qwen3-vl-4b`.

Triton brings NVIDIA's assembler along, so the kernels can be compiled to machine code on any machine: those of graphs,
and those of steps by themselves.
Prints the registers, spilled bytes and shared memory of each, and how many programs a processor runs at a time. The
exit status is 1 if one spills more than --most-spilled or fewer run than --fewest-programs: none does if it takes more
shared memory than the GPU has. It shows nothing about times or results.
"""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource

from benchmarks.geometries import GEOMETRIES, LATENT_GEOMETRIES
from benchmarks.kernels.workloads import FORMS, Case, Form, Phase, Workload, build, plan_of
from benchmarks.record import parser_of
from inducekv_vllm.attention.kernels import device, launch
from inducekv_vllm.attention.kernels.tiles import Processors

# Streaming multiprocessors, and bytes of shared memory for one program, by compute capability.
GPUS = {
    80: Processors(108, 163 * 1024),  # A100
    89: Processors(142, 99 * 1024),  # L40S
    90: Processors(132, 227 * 1024),  # H100
    100: Processors(148, 227 * 1024),  # B200
    120: Processors(188, 99 * 1024),  # RTX PRO 6000
}
SYSTEM_SHARED = 1024  # bytes of shared memory that the system takes of each program
REGISTERS = 65536  # of a processor
WARPS = {80: 64, 89: 48, 90: 64, 100: 64, 120: 48}  # on a processor at a time, at most
POINTERS = {torch.float32: "*fp32", torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.int32: "*i32"}
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
REPORTED = {"registers": r"Used (\d+) registers", "spilled": r"(\d+) bytes spill stores"}
MOST_SPILLED = 640  # bytes of a thread: no variant spills more today
DIVISIBLE = [["tt.divisibility", 16]]  # what Triton assumes of pointers, and of numbers that 16 divides


def main() -> int:
    parser = parser_of(__doc__, has_result=False)
    parser.add_argument("--geometry", nargs="+", choices=sorted(GEOMETRIES | LATENT_GEOMETRIES), required=True)
    parser.add_argument("--capability", type=int, choices=sorted(GPUS), default=90)
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="bfloat16")
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=list(FORMS))
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 64, 2048], help="of the steps that are compiled")
    parser.add_argument("--most-spilled", type=int, default=MOST_SPILLED, help="bytes (default: %(default)s)")
    parser.add_argument("--fewest-programs", type=int, default=1, help="on a processor (default: %(default)s)")
    args = parser.parse_args()
    if launch.INTERPRETED:
        parser.error("nothing can be compiled with TRITON_INTERPRET=1")
    fits = True
    for name in args.geometry:
        seen, geometry = set(), (GEOMETRIES | LATENT_GEOMETRIES)[name]
        if is_latent := geometry.latent_size is not None:
            args.forms = ["decoupled"]
        for case, in_graph in itertools.product(cases(args.rows, args.forms, has_maps=not is_latent), (True, False)):
            common = (case, geometry, DTYPES[args.dtype])
            kind = plan_of(*common, GPUS[args.capability], in_graph)[0].kind
            if kind in seen:
                continue
            seen.add(kind)
            workload = build(*common, "cpu", processors=GPUS[args.capability], in_graph=in_graph)
            how = "in a graph" if in_graph and case.phase == "decode" else "by itself"
            row = compiled(workload, args.capability)
            fits &= row["programs"] >= args.fewest_programs and row["spilled"] <= args.most_spilled
            print(f"{name}, {case.name}, {how}: {row}", flush=True)
    return 0 if fits else 1


def cases(rows: Sequence[int], forms: Sequence[Form], has_maps: bool = True) -> Iterator[Case]:
    """A short and a long memory; decoupled memory with maps, if not of latents, and without."""
    for number, entries, form in itertools.product(rows, (4, 72), forms):
        phase: Phase = "decode" if number <= 256 else "prefill"
        for map_rows in {0, 16 if form == "decoupled" and has_maps else 0}:
            yield Case(phase, number, entries, form, map_rows)


def compiled(workload: Workload, capability: int) -> dict[str, int]:
    """What the machine code of the kernel that the workload launches takes."""
    rest = (workload.query, workload.self_output, workload.self_lse, workload.geometry.scale, workload.shape)
    arguments = launch.arguments_of(workload.pools[0], workload.tables, workload.step, *rest)
    options = {name: arguments[name] for name in ("num_warps", "num_stages")}
    source = _source(device.memory_tiles, arguments)
    code = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    used = {"shared": code.metadata.shared, **_resources(code.asm["ptx"], capability)}
    return used | {"programs": programs_of_a_processor(used, options["num_warps"], capability)}


def programs_of_a_processor(used: dict[str, int], warps: int, capability: int) -> int:
    """How many programs run on a processor at a time, by registers, shared memory and warps; 0 if none fits."""
    of_a_warp = 256 * -(-used["registers"] * 32 // 256)  # registers are given to warps 256 at a time
    shared = GPUS[capability].shared_memory + SYSTEM_SHARED  # of a processor: a program has as much, less 1 KiB
    limits = (REGISTERS // (of_a_warp * warps), shared // (used["shared"] + SYSTEM_SHARED), WARPS[capability] // warps)
    return min(limits) if used["shared"] <= GPUS[capability].shared_memory else 0


def _source(kernel: Any, arguments: dict[str, Any]) -> ASTSource:
    """The kernel specialised for arguments as Triton does it at a launch."""
    signature, constants, attributes = {}, {}, {}
    for number, parameter in enumerate(kernel.params):
        value = arguments[parameter.name]
        whole = isinstance(value, int) and not parameter.do_not_specialize
        if parameter.is_constexpr or value is None or (whole and value == 1):
            signature[parameter.name] = "constexpr"
            constants[parameter.name] = value
            continue
        if isinstance(value, Tensor):
            signature[parameter.name] = POINTERS[value.dtype]
        else:
            signature[parameter.name] = "fp32" if isinstance(value, float) else "i32"
        if isinstance(value, Tensor) or (whole and value % 16 == 0):
            attributes[(number,)] = DIVISIBLE
    return ASTSource(kernel, signature, constants, attributes)


def _resources(ptx: str, capability: int) -> dict[str, int]:
    """Registers of a thread and spilled bytes, as the assembler reports them."""
    arch = f"sm_{capability}{'a' if capability >= 90 else ''}"
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        command = [get_ptxas(capability).path, "-v", f"--gpu-name={arch}", file.name, "-o", "/dev/null"]
        told = subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True).stdout
    found = {name: re.search(pattern, told) for name, pattern in REPORTED.items()}
    return {name: int(match[1]) if match else 0 for name, match in found.items()}


if __name__ == "__main__":
    sys.exit(main())
