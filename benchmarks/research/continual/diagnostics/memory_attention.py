"""How much of its attention a model gives to its memory: per layer and task, beside what the task gains.

After the last task, for each task's questions, layer l and request (paper, Eq. rho_mem_mass):

    rho_l = 1/H sum_h (sum_q sum_{k in memory} Attn[h, q, k]) / (sum_q sum_k Attn[h, q, k])

Queries q are the positions that ran: the prompt and the answer that the run recorded, given to the model in one pass.
If a relevance gate is closed there is no memory, and rho is 0. A task's gain is its accuracy less that without
memory, and its normalised gain lies between 0 and 1 (Eq. normalized_task_gain). Means over the seeds.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from statistics import mean
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from benchmarks.research.continual.results import Finished, FinishedRun, describe_runs
from benchmarks.research.continual.suites import TaskData
from benchmarks.research.drawing import blank, heatmap
from inducekv_vllm.bundle import Bundle
from inducekv_vllm.errors import ConfigError
from selector.backbone.bundled_model import BundledModel
from selector.backbone.generation import score
from selector.backbone.injection import TensorMemory, Terms, attention_with
from selector.backbone.model import Backbone, attention_named
from selector.backbone.scoring import Scorer
from selector.backbone.tiled_attention import attend_decoupled_tiled, attend_tiled
from selector.data.examples import Example

RECORDING = "inducekv_recording"
BATCH_SIZE = 32
DELTA = 1e-8  # of Eq. normalized_task_gain


def measure(finished: Finished, options: Namespace) -> dict[str, Any]:
    runs, suite = finished.chosen(options), finished.suite
    rows = [
        {
            "task": task.name,
            "mass": np.mean([mass_by_layer(finished, run, task, options.limit) for run in runs], axis=0).tolist(),
            "gain": mean(gain(finished, run, task.name) for run in runs),
        }
        for task in (*suite.tasks, suite.base)
    ]
    normalised = normalise([row["gain"] for row in rows[:-1]])
    for row, value in zip(rows, [*normalised, None], strict=True):  # the base questions are no task of the stream
        row["normalised_gain"] = value
    return {
        "finding": ", ".join(f"{row['task']} {mean(row['mass']):.1%}" for row in rows) + " of the attention.",
        **describe_runs(runs),
        "questions": {task.name: len(task.test[: options.limit]) for task in (*suite.tasks, suite.base)},
        "rows": rows,
    }


def plot(measured: dict[str, Any]) -> Figure:
    figure = blank(1.8 + 0.32 * len(measured["rows"]))
    masses, gains = figure.subplots(1, 2, width_ratios=[len(measured["rows"][0]["mass"]), 1])
    names = [f"{row['task']} ({row['gain']:+.2f})" for row in measured["rows"]]
    layers = [str(layer) for layer in range(len(measured["rows"][0]["mass"]))]
    heatmap(masses, [row["mass"] for row in measured["rows"]], names, layers, "share of attention on memory")
    masses.set(xlabel="layer", ylabel="task (gain over no memory)")
    values = [[row["normalised_gain"]] for row in measured["rows"]]
    heatmap(gains, values, [""] * len(names), ["gain"], limits=(0, 1))
    gains.set_xlabel("normalised")
    return figure


def gain(finished: Finished, run: FinishedRun, task: str) -> float:
    """Delta_t: accuracy after the last task less that of the untouched model, on the same questions."""
    return mean(mine.right - plain.right for mine, plain in finished.paired(run) if mine.task == task)


def normalise(gains: Sequence[float]) -> list[float]:
    """From 0 for the smallest to 1 for the largest; all 0 if they are equal (Eq. normalized_task_gain)."""
    return [(gain - min(gains)) / (max(gains) - min(gains) + DELTA) for gain in gains]


def mass_by_layer(finished: Finished, run: FinishedRun, task: TaskData, limit: int) -> np.ndarray:
    """rho of each layer, the mean over the first `limit` questions of a task: [L]."""
    examples, keys = task.test[:limit], finished.keys(task)[:limit]
    predictions = run.predictions()
    answers = [predictions[task.name, example.id].answer for example in examples]
    return memory_masses(finished.backbone, run.bundle(), examples, answers, keys).mean(dim=0).numpy()


@torch.no_grad()
def memory_masses(
    backbone: Backbone, bundle: Bundle, examples: Sequence[Example], answers: Sequence[str], keys: Tensor
) -> Tensor:
    """rho of n requests, given answers and keys [n, d]: [n, L] float64, 0 if the gate is closed."""
    scorer, memory = Scorer(backbone), TensorMemory.from_bundle(bundle, device=backbone.device)
    if memory.form != "merged":
        raise ConfigError("decoupled memory takes no share of the attention on the request, so none can be measured")
    opened, log_prior = BundledModel(scorer, bundle).routing(examples)
    masses_by_row = torch.zeros(len(examples), backbone.num_layers, dtype=torch.float64)
    tokenizer = backbone.tokenizer
    with_memory = opened.nonzero()[:, 0].tolist()
    for rows in (with_memory[at : at + BATCH_SIZE] for at in range(0, len(with_memory), BATCH_SIZE)):
        prompts = [scorer.prefix(examples[row]) for row in rows]
        tokens = [tokenizer(answers[row], add_special_tokens=False)["input_ids"] for row in rows]
        terms = memory.terms(keys[rows], log_prior=log_prior[rows])
        with recorded_masses(backbone) as masses:
            score(backbone, prompts, tokens, memory, terms)
        for row, prompt, answer, mass in zip(rows, prompts, tokens, torch.stack(masses, dim=1), strict=True):
            length = prompt["input_ids"].shape[1] + len(answer)  # what follows is padding
            masses_by_row[row] = mass[:, :length].double().mean(dim=(1, 2)).cpu()
    return masses_by_row


@contextmanager
def recorded_masses(backbone: Backbone) -> Iterator[list[Tensor]]:
    """Inside, every injected forward pass appends for each layer the share of memory: [n, T, H] float32.

    The pass itself is what it would be: each layer's attention runs once more with values of 1 for the request's own
    tokens and 0 for the memory's, and gives the share that the request's own tokens have; the rest is the memory's.
    """
    masses: list[Tensor] = []

    def attend(
        query: Tensor,  # [n, H, T, D]
        key: Tensor,  # [n, J, S, D]
        value: Tensor,  # [n, J, S, D]
        visible: Tensor,  # [n or 1, T, S] bool
        scaling: float,
        memory: TensorMemory,
        terms: Terms,
        layer: int,
    ) -> Tensor:
        silent = replace(memory, payload_values=torch.zeros_like(memory.payload_values))
        own = attend_tiled(query, key, torch.ones_like(value), visible, scaling, silent, terms, layer)  # [n, T, H, D]
        masses.append(1 - own[..., 0])
        return attend_tiled(query, key, value, visible, scaling, memory, terms, layer)

    AttentionInterface.register(RECORDING, attention_with(attend, attend_decoupled_tiled))
    AttentionMaskInterface.register(RECORDING, sdpa_mask)
    with attention_named(backbone, RECORDING):
        yield masses
