"""What a diagnostic is, and the JSON values that most of them begin with."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from typing import Any, Protocol

from matplotlib.figure import Figure

from benchmarks.continual.results import Finished, FinishedRun


class Diagnostic(Protocol):
    """A module or an object. Its docstring is the help text of its command, the first line a summary."""

    SOURCE: str  # the section of the paper

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Options of its own, and its own defaults for the common ones."""

    def measure(self, finished: Finished, options: Namespace) -> dict[str, Any]:
        """JSON values, among them "finding": the result in one plain sentence.

        Raises InduceKVError: names what the run lacks.
        """
        ...

    def plot(self, measured: dict[str, Any]) -> Figure:
        """The figure of what `measure` returned, read back from JSON: keys are text, NaN is None."""
        ...


def describe_runs(runs: Sequence[FinishedRun]) -> dict[str, Any]:
    """Of one method and budget."""
    return {"method": runs[0].method, "budget": runs[0].budget, "seeds": [run.seed for run in runs]}
