"""Which part of a merged memory carries its answers, or spoils them: one part is changed at a time.

After the last task, for each task's test questions, the mean NLL of the answers and the share of answers whose every
token is the likeliest: without memory, with the memory as it was learned, and with

    nearest        the nearest entry alone, in place of all of them
    uniform        every entry alike, in place of retrieval's weights
    prior          retrieval's weights added to the logits, in place of scaled keys and values
    temperature    colder and warmer retrieval
    gates          all value gates at one value
    position       the memory's tokens right before the prompt, in place of position 0
    keys in full   keys times the root of the number of entries: where all are alike, the weighting is undone in them
    values in full the same for the values
    shuffled       each entry with the values of another: what is left of an effect has nothing to do with which entry
    mean values    each token with the mean value of its layer and head: entries and tokens differ by their keys alone

A question for which a relevance gate is closed is answered without memory. Means over the seeds.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import mean
from typing import Any, Final, Literal

import torch
from matplotlib.figure import Figure
from torch import Tensor
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from benchmarks.continual.diagnostics.drawing import blank, heatmap
from benchmarks.continual.diagnostics.statistics import describe_runs
from benchmarks.continual.results import Finished
from inducekv_vllm.bundle import Bundle
from inducekv_vllm.errors import ConfigError
from selector.backbone.bundled_model import BundledModel
from selector.backbone.injection import Memory, Terms
from selector.backbone.loading import decoder
from selector.backbone.model import Backbone
from selector.backbone.scoring import Scorer
from selector.backbone.tiled_attention import tiled_attention
from selector.data.examples import Example

SOURCE = 'paper, "Ablation Study": weighting, temperature, value gates; position and content are not in the paper'
UNTOUCHED, LEARNED = "no memory", "as learned"


@dataclass(frozen=True)
class Variant:
    """One change of a memory."""

    change: Callable[[Backbone, Memory], Memory] = lambda backbone, memory: memory
    top_k: int | None = None


def _temperature(value: float) -> Variant:
    return Variant(lambda backbone, memory: replace(memory, temperature=torch.tensor(value)))


def _gates(value: float) -> Variant:
    return Variant(lambda backbone, memory: replace(memory, value_gates=torch.full_like(memory.value_gates, value)))


def before_the_prompt(backbone: Backbone, memory: Memory) -> Memory:
    """Each entry's m keys rotated to the positions -m, ..., -1: keys [L, B, J, m, D].

    Raises ConfigError: the model's rotation depends on more than a token's row.
    """
    m = memory.payload_keys.shape[3]
    positions = torch.arange(-m, 0)[None]
    cos, sin = decoder(backbone.model).rotary_emb(memory.payload_keys, positions)  # [1, m, D]
    if cos.ndim != 3:
        raise ConfigError("the model's positions have several parts: its memory cannot be moved by one number")
    keys = memory.payload_keys.flatten(0, 1)  # [L B, J, m, D]
    rotated, _ = apply_rotary_pos_emb(keys, keys, cos, sin)
    return replace(memory, payload_keys=rotated.view_as(memory.payload_keys))


def _in_full(part: Literal["payload_keys", "payload_values"]) -> Variant:
    """Times the root of the number of entries: weighting by the root of a weight of 1 / entries leaves it as it is."""

    def change(backbone: Backbone, memory: Memory) -> Memory:
        stored: Tensor = getattr(memory, part)  # [L, B, J, m, D]
        return replace(memory, **{part: stored * stored.shape[1] ** 0.5})

    return Variant(change)


VARIANTS: Final[Mapping[str, Variant]] = {
    LEARNED: Variant(),
    "nearest": Variant(top_k=1),
    # Entries whose keys are 0 all have the same score.
    "uniform": Variant(
        lambda backbone, memory: replace(memory, retrieval_keys=torch.zeros_like(memory.retrieval_keys))
    ),
    "prior": Variant(lambda backbone, memory: replace(memory, weighting="prior")),
    **{f"temperature {value}": _temperature(value) for value in (0.01, 0.2, 1.0)},
    **{f"gates {value}": _gates(value) for value in (0.0, 0.5, 1.0)},
    "position": Variant(before_the_prompt),
    "keys in full": _in_full("payload_keys"),
    "values in full": _in_full("payload_values"),
    "shuffled": Variant(
        lambda backbone, memory: replace(memory, payload_values=memory.payload_values.roll(1, dims=1)),
    ),
    "mean values": Variant(
        lambda backbone, memory: replace(
            memory, payload_values=memory.payload_values.mean((1, 3), keepdim=True).expand_as(memory.payload_values)
        ),
    ),
}


def add_arguments(parser: ArgumentParser) -> None:
    parser.set_defaults(method="paper")
    parser.add_argument("--limit", type=int, default=500, help="questions of each task, at most (default %(default)s)")


def measure(finished: Finished, options: Namespace) -> dict[str, Any]:
    runs, backbone = finished.chosen(options), finished.backbone
    if (form := runs[0].bundle().metadata.form) != "merged":
        raise ConfigError(f"{runs[0].method} has {form} memory: these parts are those of merged memory")
    rows = []
    for task in finished.suite.tasks:
        examples, keys = task.test[: options.limit], finished.keys(task)[: options.limit]
        scored = [by_variant(backbone, run.bundle(), examples, keys) for run in runs]
        for name in scored[0]:
            nll, accuracy = (mean(scores[name][part] for scores in scored) for part in (0, 1))
            rows.append({"task": task.name, "variant": name, "nll": nll, "accuracy": accuracy})
    return {
        "finding": _finding(rows),
        **describe_runs(runs),
        "questions": {task.name: len(task.test[: options.limit]) for task in finished.suite.tasks},
        "rows": rows,
    }


@torch.no_grad()
def by_variant(
    backbone: Backbone, bundle: Bundle, examples: Sequence[Example], keys: Tensor
) -> dict[str, tuple[float, float]]:
    """Mean NLL and accuracy on n examples with keys [n, d], by the name of each variant."""
    scorer = Scorer(backbone)
    untouched = [_scores(scorer, example) for example in examples]
    scores = {UNTOUCHED: untouched}
    opened, log_prior = BundledModel(scorer, bundle).routing(examples)
    rows = opened.nonzero()[:, 0].tolist()
    with tiled_attention(backbone):
        for name, variant in VARIANTS.items():
            memory = variant.change(backbone, Memory.from_bundle(bundle))
            scores[name] = list(untouched)
            for row in rows:
                terms = memory.terms(keys[[row]], top_k=variant.top_k, log_prior=log_prior[[row]])
                scores[name][row] = _scores(scorer, examples[row], memory, terms)
    return {name: (mean(nll for nll, _ in of), mean(right for _, right in of)) for name, of in scores.items()}


def _scores(
    scorer: Scorer, example: Example, memory: Memory | None = None, terms: Terms | None = None
) -> tuple[float, bool]:
    """NLL of an example's answer, and whether it is the greedy one."""
    predicted = scorer.predicted([example], memory, terms)
    right = predicted[0].argmax(dim=-1).tolist() == scorer.answer_tokens(example)
    return float(scorer.losses_of([example], predicted)), right


def plot(measured: dict[str, Any]) -> Figure:
    tasks = list(dict.fromkeys(row["task"] for row in measured["rows"]))
    variants = list(dict.fromkeys(row["variant"] for row in measured["rows"]))
    figure = blank(1.4 + 0.5 * len(tasks))
    axes = figure.add_subplot()
    values = [[row["nll"] for row in measured["rows"] if row["task"] == task] for task in tasks]
    heatmap(axes, values, tasks, variants, "mean NLL of an answer")
    return figure


def _finding(rows: Sequence[dict[str, Any]]) -> str:
    means = {
        name: (
            mean(r["nll"] for r in rows if r["variant"] == name),
            mean(r["accuracy"] for r in rows if r["variant"] == name),
        )
        for name in dict.fromkeys(row["variant"] for row in rows)
    }
    best = min((name for name in means if name != UNTOUCHED), key=lambda name: means[name][0])
    return (
        f"Answers have an NLL of {means[UNTOUCHED][0]:.2f} without memory, {means[LEARNED][0]:.2f} with the memory as "
        f'learned and {means[best][0]:.2f} with its best variant, "{best}"; right are {means[UNTOUCHED][1]:.1%}, '
        f"{means[LEARNED][1]:.1%} and {means[best][1]:.1%}."
    )
