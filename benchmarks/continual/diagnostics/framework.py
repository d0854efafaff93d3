"""What a diagnostic is, and the options that all of them have."""

from __future__ import annotations

import importlib
import pkgutil
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from matplotlib.figure import Figure

from benchmarks.continual.results import Finished


@runtime_checkable
class Diagnostic(Protocol):
    """A module of this package. Its docstring's first line says what it measures.

    It may also have `add_arguments(parser)`, for options of its own.
    """

    def measure(self, finished: Finished, options: Namespace) -> dict[str, Any]:
        """JSON values, among them "diagnostic" (the module's name), "source" (the paper's section) and "says" (one
        plain sentence: what was found).

        Args:
            options: those of `add_common_arguments`, and the diagnostic's own.

        Raises:
            InduceKVError: what is missing in the run, by name.
        """
        ...

    def plot(self, found: dict[str, Any]) -> Figure:
        """The figure of what `measure` found, as it is read back from JSON: keys are text, NaN is None."""
        ...


def find_diagnostics() -> dict[str, Diagnostic]:
    """Every diagnostic of this package, by name."""
    package = __name__.rpartition(".")[0]
    folder = importlib.import_module(package).__path__
    names = [module.name for module in pkgutil.iter_modules(folder) if not module.name.startswith("_")]
    modules: dict[str, Any] = {name: importlib.import_module(f"{package}.{name}") for name in names}
    return {name: module for name, module in modules.items() if isinstance(module, Diagnostic)}


def add_common_arguments(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("--out", type=Path, required=True, help="the folder of a finished run")
    add("--method", default="refined", help="(default: %(default)s)")
    add("--budget", type=int, help="(default: the method's only one)")
    add("--seed", nargs="+", type=int, help="(default: all there are)")
    add("--model", type=Path, help="the model of the run (default: where the run found it)")
    add("--data", type=Path, help="the suite's data (default: where the run found them)")
