"""The perplexity of plain text that no task is about, with what a method has learned: the price beside base questions.

The text is that of scikit-learn's dataset descriptions, in the run's data or else as installed. The first third of each
paragraph stands in the question; the rest is scored as the answer, behind the method's own gate. The perplexity is exp
of a token's mean NLL, over all paragraphs together. `--method no_memory` is the untouched model's.
"""

from __future__ import annotations

import math
import statistics
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from benchmarks.continual.answering import OfflineAnswerer
from benchmarks.continual.diagnostics.drawing import blank
from benchmarks.continual.diagnostics.statistics import describe_runs
from benchmarks.continual.results import Finished, FinishedRun
from benchmarks.real.passages import read_held_out
from inducekv_vllm.errors import ConfigError
from selector.backbone.bundled_model import BundledModel
from selector.backbone.model import Backbone
from selector.backbone.scoring import Scorer
from selector.data.examples import Example

SOURCE = "design: what a memory costs requests that have nothing to do with it; not in the paper"


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--paragraphs", type=int, help="how many at most (default: all)")


def measure(finished: Finished, options: Namespace) -> dict[str, Any]:
    runs = finished.chosen(options)
    if runs[0].artifact().kind == "copier":
        raise ConfigError(f"{runs[0].method} copies answers: it has no model whose perplexity could be measured")
    examples = read_held_out(finished.data)[: options.paragraphs]
    answerer = OfflineAnswerer(finished.model, batch_size=1)
    untouched = answerer.untouched()
    tokens = [len(untouched.bundled.scorer.answer_tokens(example)) for example in examples]
    before = perplexity(untouched.losses(examples), tokens)
    after = [perplexity(answerer.prepare(run.artifact(), run.state()).losses(examples), tokens) for run in runs]
    mean = statistics.mean(after)
    return {
        "finding": f"The perplexity of plain text is {mean:.2f} with {runs[0].method} after the last task, and "
        f"{before:.2f} with the untouched model.",
        **describe_runs(runs),
        "untouched": before,
        "perplexity": after,
        "opened": [opened(run, examples, finished.model) for run in runs],
        "tokens": sum(tokens),
        "paragraphs": len(examples),
    }


def opened(run: FinishedRun, examples: Sequence[Example], model: Path) -> float | None:
    """The share of the paragraphs for which a bundle's gate opens; None for what is no bundle or has no gate."""
    if run.artifact().kind != "bundle" or run.bundle().gate is None:
        return None
    with_memory, _ = BundledModel(Scorer(Backbone.load(model)), run.bundle()).routing(examples)  # [n]
    return float(with_memory.double().mean())


def perplexity(losses: Sequence[float], tokens: Sequence[int]) -> float:
    return math.exp(math.fsum(losses) / sum(tokens))


def plot(measured: dict[str, Any]) -> Figure:
    figure = blank(2.4)
    axes = figure.add_subplot()
    names = ["untouched", *(f"seed {seed}" for seed in measured["seeds"])]
    axes.bar(names, [measured["untouched"], *measured["perplexity"]], 0.5)
    axes.set(ylabel="perplexity")
    return figure
