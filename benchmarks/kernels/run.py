"""The kernels' benchmark: `python -m benchmarks.kernels.run --geometry qwen3-vl-4b --device cuda|interpreter`.

`benchmarks/kernels/__init__.py` says what is measured. With `--device interpreter` small steps run through every
section on the CPU, which shows that the results are right; nothing is timed. With `--device cuda` the result, with
hardware and versions, goes to `benchmarks/results/kernels_GEOMETRY_DTYPE.json`, or to `--output`, after each section
anew. Ends in one JSON line; the exit status is 1 if a result is wrong, or if something failed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.geometries import GEOMETRIES
from benchmarks.record import parser_of

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
SECTIONS = ("attention", "replay", "rivals")
RESULTS = Path(__file__).parents[1] / "results"


def main() -> int:
    args = parse_arguments()
    # Triton decides when it is first imported, so the sections are imported behind this.
    if args.device == "interpreter":
        os.environ["TRITON_INTERPRET"] = "1"
    from benchmarks.kernels import attention, replay, rivals, timing
    from benchmarks.machine import describe_machine
    from benchmarks.record import command

    geometry, dtype = GEOMETRIES[args.geometry], DTYPES[args.dtype]
    timed = args.device == "cuda"
    device = "cuda" if timed else "cpu"
    peaks = timing.measure_peaks(dtype) if timed else None
    common = (geometry, dtype, device)
    sections: dict[str, Callable[[], list[dict[str, Any]]]] = {
        "attention": lambda: attention.measure(*common, peaks, tell),
        "replay": lambda: replay.measure(*common, tell, timed),
        "rivals": lambda: rivals.measure(*common, tell, timed),
    }
    result: dict[str, Any] = {
        "benchmark": "kernels",
        "command": command(),
        **{name: getattr(args, name) for name in ("geometry", "dtype", "device")},
        "machine": describe_machine(),
    }
    if peaks is not None:
        result["peaks"] = peaks.as_dict()
    for name in args.sections:
        tell(f"== {name}")
        try:
            result[name] = sections[name]()
        except Exception as error:  # the other sections are still worth their time on a borrowed machine
            traceback.print_exc()
            result[name] = [{"right": False, "error": f"{type(error).__name__}: {error}"}]
        result["right"] = all(row["right"] for section in SECTIONS for row in result.get(section, []))
        write(result, args)
    print(json.dumps(result))
    return 0 if result["right"] else 1


def parse_arguments() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--geometry", choices=sorted(GEOMETRIES), required=True)
    parser.add_argument("--device", choices=("cuda", "interpreter"), required=True)
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="bfloat16")
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda needs a CUDA device, and PyTorch finds none; --device interpreter needs no GPU")
    return args


def write(result: dict[str, Any], args: argparse.Namespace) -> None:
    path: Path | None = args.output
    if path is None and args.device == "cuda":
        path = RESULTS / f"kernels_{args.geometry}_{args.dtype}.json"
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, indent=2) + "\n")


def tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
