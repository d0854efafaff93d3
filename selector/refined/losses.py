"""The refined recipe's losses on a training problem.

    current NLL + beta (anchor NLL + distillation KL from the previous memory)

A question is routed to its own task's entries, never to the entry that was made of it, so that entries learn to answer
other questions.

Shapes: K entries of the next memory, n questions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import kl_div

from ..backbone.generation import answer_logprobs
from ..backbone.injection import Memory
from ..backbone.scoring import batch_rows, mean_of_batch
from .settings import RefinedSettings
from .training_problem import RoutedQuestions, Teacher, TrainingProblem


@dataclass(frozen=True)
class Losses:
    """The losses of one step: [] each, None for those that the problem does not have."""

    current: Tensor
    anchors: Tensor | None = None
    distillation: Tensor | None = None

    def total(self, settings: RefinedSettings) -> Tensor:
        if self.anchors is None:
            return self.current
        anchors = self.anchors
        if self.distillation is not None:
            anchors = anchors + settings.distillation * self.distillation
        return self.current + settings.beta * anchors


def step_losses(problem: TrainingProblem, settings: RefinedSettings, memory: Memory, step: int) -> Losses:
    """The losses of `memory` on the batches of step number `step`. Collective."""
    rows = batch_rows(len(problem.current), settings.batch_size, settings.seed, (2, step))
    routed = restrict(problem.current, problem.nested[subset_of_step(step, len(problem.nested))])
    current = mean_of_batch(rows, lambda batch: _nll(problem, settings, routed, memory, batch))
    if (anchors := problem.anchors) is None:
        return Losses(current)
    rows = batch_rows(len(anchors), settings.batch_size, settings.seed, (3, step))
    anchor_nll = mean_of_batch(rows, lambda batch: _nll(problem, settings, anchors, memory, batch))
    if (teacher := problem.teacher) is None or settings.distillation == 0:
        return Losses(current, anchor_nll)
    kl = mean_of_batch(rows, lambda batch: _kl(problem, settings, anchors, teacher, memory, batch))
    return Losses(current, anchor_nll, kl)


def subset_of_step(step: int, num_subsets: int) -> int:
    """Which of S rows of `TrainingProblem.nested` a step uses: its number of trailing one bits, at most S - 1."""
    return min((step ^ (step + 1)).bit_length() - 1, num_subsets - 1)


def restrict(routed: RoutedQuestions, entries: Tensor) -> RoutedQuestions:
    """The questions with only `entries` [K] bool; a question that would have none keeps its own."""
    limited = routed.log_prior.masked_fill(~entries, -math.inf)  # [n, K]
    empty = (limited == -math.inf).all(dim=1, keepdim=True)
    return replace(routed, log_prior=torch.where(empty, routed.log_prior, limited))


def reachable(memory: Memory, log_prior: Tensor) -> tuple[Memory, Tensor]:
    """The memory and the prior [n, K] without entries that none of the n questions may retrieve.

    Under "sqrt" they stay: an entry of alpha = 0 still takes its share of the attention.
    """
    used = (log_prior > -math.inf).any(dim=0)  # [K] bool
    if memory.weighting == "sqrt" or bool(used.all()):
        return memory, log_prior
    kept = replace(
        memory,
        retrieval_keys=memory.retrieval_keys[used],
        payload_keys=memory.payload_keys[:, used],
        payload_values=memory.payload_values[:, used],
        map_in=None if memory.map_in is None else memory.map_in[:, used],
        map_out=None if memory.map_out is None else memory.map_out[:, used],
    )
    return kept, log_prior[:, used]


def _nll(
    problem: TrainingProblem, settings: RefinedSettings, routed: RoutedQuestions, memory: Memory, rows: list[int]
) -> Tensor:
    """NLL of each row: [len(rows)]."""
    memory, prior = reachable(memory, routed.log_prior[rows])
    terms = routed.questions.terms(memory, rows, prior)
    with _precision(problem, settings):
        return problem.scorer.losses([routed.questions.examples[row] for row in rows], memory, terms)


def _kl(
    problem: TrainingProblem,
    settings: RefinedSettings,
    routed: RoutedQuestions,
    teacher: Teacher,
    memory: Memory,
    rows: list[int],
) -> Tensor:
    """KL(teacher | memory), summed over the answer's tokens, of each row: [len(rows)]."""
    scorer = problem.scorer
    examples = [routed.questions.examples[row] for row in rows]
    prompts, answers = [scorer.prefix(e) for e in examples], [scorer.answer_tokens(e) for e in examples]
    teacher_memory, prior = reachable(teacher.memory, teacher.log_prior[rows])
    teacher_terms = routed.questions.terms(teacher_memory, rows, prior)
    with torch.no_grad(), _precision(problem, settings):
        targets = answer_logprobs(scorer.backbone, prompts, answers, teacher_memory, teacher_terms)
    memory, prior = reachable(memory, routed.log_prior[rows])
    terms = routed.questions.terms(memory, rows, prior)
    with _precision(problem, settings):
        predicted = answer_logprobs(scorer.backbone, prompts, answers, memory, terms)
    pairs = zip(predicted, targets, strict=True)
    return torch.stack([kl_div(logprobs, target, reduction="sum", log_target=True) for logprobs, target in pairs])


def _precision(problem: TrainingProblem, settings: RefinedSettings) -> torch.autocast:
    device = problem.scorer.backbone.device.type
    return torch.autocast(device, torch.bfloat16, enabled=settings.precision == "bfloat16")
