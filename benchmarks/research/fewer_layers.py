"""Memory in some layers alone, at equal bytes: all, the last half, a third (the last, spread, by gradient).

    python -m benchmarks.research.fewer_layers --model DIR [--task FILE --questions FILE] [--chosen 8] --output FILE

The task is by default the 80 support tickets; a tenth of them is held out to stop by, and 24 others are asked. Each
memory has one entry, which acts on the generation unless `--activation` says otherwise, trained as by `inducekv-select
--preset quick`: in k of L layers it has L / k times the tokens and the rank of maps, but for two choices (`TIMES`).
`--preset quick` itself has `EVERY_SECOND`. "By gradient" is by what the first batch says: the norm of the gradient of
their values, before any step. Every question has the memory, whatever a gate would say. `right`: every token of the
answer, and the end of it, is the likeliest after those before it. `nll`: the mean of the answers'. Resumable: what FILE
has is not trained again.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.from_a_table.__main__ import TABLES
from benchmarks.record import keep, parser_of
from inducekv_vllm.backbone.memory_layers import ONE_IN, spread_layers
from inducekv_vllm.bundle.activation import ACTIVATIONS, Activation
from inducekv_vllm.errors import ConfigError, InduceKVError
from selector.backbone.model import Backbone
from selector.backbone.scoring import EVALUATION_BATCHES, Questions, Scorer
from selector.backbone.tiled_attention import tiled_attention
from selector.backbone.token_values import layers_of_gate
from selector.cli.columns import ColumnOptions
from selector.data.choice import hold_out
from selector.data.examples import Example, read_task
from selector.recipes import DEFAULT as RECIPE
from selector.refined.candidates import active_from, preconditioned, rates_for
from selector.refined.entries import initial_entries
from selector.refined.settings import RefinedSettings
from selector.refined.shape import EntryShape
from selector.refined.training import Training, TrainingProblem, log_prior, step_loss, train
from selector.update.inputs import TaskInputs

TOKENS, RANK = 16, 8  # of memory in all layers
EVERY_SECOND, WITH_FEWER_BYTES = "every second of the last two thirds", "the same, no more tokens"
FROM_GATE = "every third from the gate's layer on"
CHOICES = ("all", "last half", "last third", "by gradient", "every third", FROM_GATE, EVERY_SECOND, WITH_FEWER_BYTES)
TIMES = {WITH_FEWER_BYTES: 1, FROM_GATE: ONE_IN}  # the bytes in a layer, where all together have fewer than usual


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    try:
        run(options)
    except InduceKVError as error:
        print(f"python -m benchmarks.research.fewer_layers: error: {error}", file=sys.stderr)
        return 2
    return 0


def run(options: argparse.Namespace) -> None:
    named = None if options.task.suffix == ".jsonl" else options.columns
    columns = ColumnOptions(columns=named, task_name="support").of_table()
    rows, questions = read_task(options.task, columns), read_task(options.questions, columns)
    backbone = Backbone.load(options.model)
    before = json.loads(options.output.read_text()) if options.output.is_file() else {"rows": []}
    if before.get("activation", options.activation) != options.activation:
        raise ConfigError(f"{options.output} is of memory on the {before['activation']}: name another file")
    known = before["rows"]
    made = {(row["layers"], row["seed"], row.get("rate") if options.rate else None) for row in known}
    with tiled_attention(backbone):
        scorer = Scorer(backbone, batch_size=4 * EVALUATION_BATCHES)
        for seed in options.seeds:
            for name in options.layers:
                if (name, seed, options.rate) not in made:
                    known.append(measured(scorer, rows, questions, name, options, seed))
                    described = {"benchmark": "fewer_layers", "model": options.model.name, "questions": len(questions)}
                    described |= {"activation": options.activation, "rows": known}
                    keep(described, options.output)


def measured(
    scorer: Scorer,
    rows: Sequence[Example],
    questions: Sequence[Example],
    name: str,
    options: argparse.Namespace,
    seed: int,
) -> dict[str, Any]:
    """Train the memory of one choice of layers, and ask it."""
    began, L = time.process_time(), scorer.backbone.num_layers
    settings = settings_of(options.activation, seed)
    layers = layers_of(name, scorer, rows, options.chosen, settings)
    rate = options.rate or rates_for(scorer.backbone, options.activation)[0]
    shape = shape_of(layers, TIMES.get(name, L // len(layers)))
    training = Training(problem_of(scorer, rows, settings, shape), settings, rate)
    memory = train(training, None, name)
    seconds, asked = time.process_time() - began, asked_with(scorer, questions, options.activation)
    losses = scorer.each_loss(asked, memory)
    right = 0
    with torch.no_grad():
        for start in range(0, len(questions), scorer.batch_size):
            part = slice(start, start + scorer.batch_size)
            predicted = scorer.predicted(questions[part], memory, asked.terms(memory, part, None))
            pairs = zip(questions[part], predicted, strict=True)
            right += sum(log_p.argmax(dim=-1).tolist() == scorer.answer_tokens(each) for each, log_p in pairs)
    return {
        "layers": name,
        "seed": seed,
        "of": L,
        "trained": list(layers),
        "rate": rate,
        "tokens": shape.payload_tokens,
        "map_rank": shape.map_rank,
        "right": right,
        "nll": round(float(losses.mean()), 4),
        "nll_error": round(float(losses.std()) / len(losses) ** 0.5, 4),
        "steps": training.step,
        "cpu_seconds": round(seconds, 1),
    }


def layers_of(name: str, scorer: Scorer, rows: Sequence[Example], chosen: int, settings: RefinedSettings) -> list[int]:
    L, gate = scorer.backbone.num_layers, layers_of_gate(scorer.backbone)[-1]
    every_third, every_second = range(ONE_IN - 1, L, ONE_IN), spread_layers(L)
    ranges: dict[str, Sequence[int]] = {
        "all": range(L),
        "last half": range(L - L // 2, L),
        "last third": range(L - L // 3, L),
        "every third": every_third,
        FROM_GATE: [layer for layer in every_third if layer >= gate],
        EVERY_SECOND: every_second,
        WITH_FEWER_BYTES: every_second,
    }
    if name in ranges:
        return list(ranges[name])
    norms = gradient_norms(scorer, rows, settings)
    return sorted(norms.argsort(descending=True)[:chosen].tolist())


def gradient_norms(scorer: Scorer, rows: Sequence[Example], settings: RefinedSettings) -> Tensor:
    """Of the values of each layer, over the first batch: [L]."""
    problem = problem_of(scorer, rows, settings, shape_of(range(scorer.backbone.num_layers), 1))
    training = Training(problem, settings, 0.0)
    memory = replace(problem.memory, payload_values=training.parameters["payload_values"])
    loss = step_loss(problem, settings, memory, 0)
    (gradient,) = torch.autograd.grad(loss, [training.parameters["payload_values"]])
    return gradient.flatten(1).norm(dim=1)


def shape_of(layers: Sequence[int], times: int) -> EntryShape:
    """With so many times the bytes in a layer."""
    return EntryShape(tuple(layers), TOKENS * times, RANK * times)


def settings_of(activation: Activation, seed: int) -> RefinedSettings:
    """Of the preset `quick`."""
    return RefinedSettings(**{**RECIPE.presets["quick"], "activation": activation}, facts="off", seed=seed)


def problem_of(
    scorer: Scorer, rows: Sequence[Example], settings: RefinedSettings, shape: EntryShape
) -> TrainingProblem:
    training, validation = hold_out(rows, settings.seed)
    inputs = TaskInputs(training, validation, [], None)
    entries, records = initial_entries(scorer.backbone, inputs, settings, shape)
    assert settings.activation != "search"
    asked = [asked_with(scorer, each, settings.activation) for each in (training, validation)]
    problem = TrainingProblem(scorer, entries, asked[0], log_prior(training, records), asked[1], calibrate=False)
    return preconditioned(problem, settings)


def asked_with(scorer: Scorer, questions: Sequence[Example], activation: Activation) -> Questions:
    """One entry for all needs no keys."""
    keys = torch.zeros(len(questions), scorer.backbone.hidden_size)
    return active_from(scorer, Questions(questions, keys), activation)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--task", type=Path, default=TABLES / "train.csv")
    parser.add_argument("--questions", type=Path, default=TABLES / "test.csv")
    parser.add_argument("--columns", default="prompt=ticket,answer=team", help="of a table (%(default)s)")
    parser.add_argument("--chosen", type=int, default=8, help="layers, by gradient (%(default)s)")
    parser.add_argument("--layers", nargs="+", choices=CHOICES, default=CHOICES, help="(default: all of these)")
    parser.add_argument(
        "--activation", choices=ACTIVATIONS, default="generation", help="what memory acts on (%(default)s)"
    )
    parser.add_argument("--rate", type=float, help="of the tokens (default: as `inducekv-select` has it)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    options = parser.parse_args(arguments)
    if options.output is None:
        parser.error("--output is needed: it is what a stopped run goes on from")
    return options


if __name__ == "__main__":
    raise SystemExit(main())
