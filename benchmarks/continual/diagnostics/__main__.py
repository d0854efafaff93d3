"""The command: see the package."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Mapping, Sequence
from inspect import cleandoc
from pathlib import Path
from typing import Any, Protocol

from matplotlib.figure import Figure

from benchmarks.continual.diagnostics import calibration, diversity, memory_attention, order, sweeps
from benchmarks.continual.diagnostics.drawing import png
from benchmarks.continual.diagnostics.retrieval import Ambiguity, HitRate
from benchmarks.continual.results import Finished
from benchmarks.machine import describe_machine
from inducekv_vllm.errors import ConfigError, InduceKVError
from selector.runtime.files import replace_file

PROGRAM = "python -m benchmarks.continual.diagnostics"


class Diagnostic(Protocol):
    """A module or an object. Its docstring is the help text of its command, the first line a summary."""

    SOURCE: str  # the section of the paper

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Options of its own, and its own defaults for the common ones."""

    def measure(self, finished: Finished, options: argparse.Namespace) -> dict[str, Any]:
        """JSON values; "finding" is the result in a plain sentence. Raises InduceKVError: names what the run lacks."""
        ...

    def plot(self, measured: dict[str, Any]) -> Figure:
        """The figure of what `measure` returned, read back from JSON: keys are text, NaN is None."""
        ...


DIAGNOSTICS: Mapping[str, Diagnostic] = {
    "ambiguity": Ambiguity(),
    "calibration": calibration,
    "diversity": diversity,
    "hit_rate": HitRate(),
    "memory_attention": memory_attention,
    "order": order,
    "sweeps": sweeps,
}


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        print(json.dumps(run(options)))
    except InduceKVError as error:
        print(f"{PROGRAM}: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Measures, plots and writes; returns finding and paths. Raises ConfigError: the folder cannot be written."""
    import torch
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    if options.threads:
        torch.set_num_threads(options.threads)
    diagnostic = DIAGNOSTICS[options.diagnostic]
    head = {"diagnostic": options.diagnostic, "source": diagnostic.SOURCE}
    finished = Finished.read(options.out, options.model, options.data)
    measured = as_json(head | diagnostic.measure(finished, options) | {"machine": describe_machine()})
    path = options.out / "diagnostics" / f"{options.name or options.diagnostic}.json"
    picture = png(diagnostic.plot, measured)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path.with_suffix(".png"), picture)
        # Last: if it exists, so does its picture.
        replace_file(path, (json.dumps(measured, indent=1, allow_nan=False) + "\n").encode())
    except OSError as error:
        raise ConfigError(f"{path}: cannot write the result: {error}") from error
    return head | {"finding": measured["finding"], "files": [str(path), str(path.with_suffix(".png"))]}


def as_json(value: Any) -> Any:
    """As read back from JSON, numbers with six significant digits; what is not a finite number is None."""
    if isinstance(value, dict):
        return {str(key): as_json(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [as_json(inner) for inner in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=PROGRAM, description="Explains the numbers of a finished run.")
    commands = parser.add_subparsers(dest="diagnostic", required=True, metavar="NAME")
    for name, diagnostic in DIAGNOSTICS.items():
        text = cleandoc(diagnostic.__doc__ or "").replace("%", "%%")
        formatter = argparse.RawDescriptionHelpFormatter
        command = commands.add_parser(name, help=text.split("\n")[0], description=text, formatter_class=formatter)
        add = command.add_argument
        add("--out", type=Path, required=True, help="the folder of a finished run")
        add("--method", default="refined", help="(default: %(default)s)")
        add("--budget", type=int, help="(default: the method's only one)")
        add("--seed", nargs="+", type=int, help="(default: all there are)")
        add("--model", type=Path, help="the model of the run (default: where the run found it)")
        add("--data", type=Path, help="the suite's data (default: where the run found them)")
        add("--threads", type=int, default=0, help="of torch (default: its own choice)")
        add("--name", help="of the files that are written (default: the diagnostic's)")
        diagnostic.add_arguments(command)
    return parser


if __name__ == "__main__":
    sys.exit(main())
