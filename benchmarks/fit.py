"""Training of a few parameters of a backbone on the current task, on rehearsed examples, and under a penalty."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from inducekv_vllm.errors import TaskDataError
from selector.backbone.scoring import Scorer, batch_rows
from selector.data.examples import Example

WARM_UP = 0.1  # of the steps
MAX_NORM = 1.0  # of the gradient
KEEP_LOSS_EVERY = 10  # steps
MEASURED_AT_ONCE = 64  # validation examples

# From a step's examples and the log-probabilities [answer tokens, vocabulary] float32 of each to the term added to the
# mean loss: [], differentiable.
Penalty = Callable[[Sequence[Example], Sequence[Tensor]], Tensor]


@dataclass(frozen=True)
class Fit:
    """AdamW on the mean NLL of batches; half of each batch is rehearsed if there is anything to rehearse.

    `autocast` computes in bfloat16 in training; parameters, optimizer and reported losses stay float32.
    """

    scorer: Scorer
    parameters: Sequence[nn.Parameter]
    training: Sequence[Example]
    rehearsed: Sequence[Example]  # of earlier tasks
    batch_size: int
    seed: tuple[int, ...]
    autocast: bool
    penalty: Penalty | None = None

    def run(self, rate: float, steps: int) -> list[dict[str, Any]]:
        """`steps` steps, with a short linear rise of the learning rate and a cosine fall; returns losses on the way."""
        optimizer = torch.optim.AdamW(self.parameters, lr=rate, weight_decay=0.0)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: share_of_rate(step, steps))
        history = []
        for step in range(steps):
            terms = self.losses(self.batch(step))
            optimizer.zero_grad(set_to_none=True)
            sum(terms.values()).backward()
            nn.utils.clip_grad_norm_(self.parameters, MAX_NORM)
            optimizer.step()
            schedule.step()
            if step % KEEP_LOSS_EVERY == 0 or step == steps - 1:
                history.append({"step": step} | {name: float(term.detach()) for name, term in terms.items()})
        return history

    def run_best(self, rates: Sequence[float], steps: int, validation: Sequence[Example]) -> dict[str, Any]:
        """`run` with each rate from the same start; the parameters of the least mean NLL on `validation` stay.

        Returns that rate, its history and its NLL and, of several rates, each one's NLL: None if it diverged.

        Raises:
            TaskDataError: training diverges with every rate.
        """
        if len(rates) == 1:
            history = self.run(rates[0], steps)
            return {"learning_rate": rates[0], "history": history, "validation_nll": self.mean_loss(validation)}
        start = [parameter.detach().clone() for parameter in self.parameters]
        finished: dict[float, tuple[float, list[dict[str, Any]], list[Tensor]]] = {}
        for rate in rates:
            assign(self.parameters, start)
            try:
                history = self.run(rate, steps)
                loss = self.mean_loss(validation)
            except TaskDataError:
                if rate == rates[-1] and not finished:
                    raise
                continue
            finished[rate] = loss, history, [parameter.detach().clone() for parameter in self.parameters]
        best = min(finished, key=lambda rate: finished[rate][0])
        loss, history, trained = finished[best]
        assign(self.parameters, trained)
        tried = {str(rate): finished[rate][0] if rate in finished else None for rate in rates}
        return {"learning_rate": best, "history": history, "validation_nll": loss, "rates_tried": tried}

    def losses(self, batch: Sequence[Example]) -> dict[str, Tensor]:
        """The terms whose sum a step minimises: the mean NLL, and the penalty if there is one. [] each."""
        with torch.autocast(self.scorer.backbone.device.type, torch.bfloat16, enabled=self.autocast):
            predicted = self.scorer.predicted(batch)
        loss = self.scorer.losses_of(batch, predicted).mean()
        return {"loss": loss} if self.penalty is None else {"loss": loss, "penalty": self.penalty(batch, predicted)}

    def batch(self, step: int) -> list[Example]:
        """Examples of the current task, and as many rehearsed ones; the same for every learning rate."""
        old = self.batch_size // 2 if self.rehearsed else 0
        rows = batch_rows(len(self.training), self.batch_size - old, self.seed[0], (*self.seed[1:], 0, step))
        batch = [self.training[row] for row in rows]
        if old:
            rows = batch_rows(len(self.rehearsed), old, self.seed[0], (*self.seed[1:], 1, step))
            batch += [self.rehearsed[row] for row in rows]
        return batch

    @torch.no_grad()
    def mean_loss(self, examples: Sequence[Example]) -> float:
        """Mean NLL."""
        return sum(float(self.scorer.losses(batch).double().sum()) for batch in batches_of(examples)) / len(examples)

    @torch.no_grad()
    def accuracy(self, examples: Sequence[Example]) -> float:
        """The share that is answered right, token by token of the right answer."""
        return sum(map(self._count_right, batches_of(examples))) / len(examples)

    def _count_right(self, batch: Sequence[Example]) -> int:
        """How many have the likeliest token at every place of their answer."""
        pairs = zip(batch, self.scorer.predicted(batch), strict=True)
        return sum(log_p.argmax(dim=-1).tolist() == self.scorer.answer_tokens(each) for each, log_p in pairs)


def batches_of(examples: Sequence[Example]) -> Iterator[Sequence[Example]]:
    return (examples[start : start + MEASURED_AT_ONCE] for start in range(0, len(examples), MEASURED_AT_ONCE))


@torch.no_grad()
def assign(parameters: Sequence[nn.Parameter], values: Sequence[Tensor]) -> None:
    for parameter, value in zip(parameters, values, strict=True):
        parameter.copy_(value)


def share_of_rate(step: int, steps: int) -> float:
    """Of the learning rate at `step`: up to 1 over the first tenth, then along a cosine towards 0."""
    rise = max(1, round(WARM_UP * steps))
    if step < rise:
        return (step + 1) / rise
    return 0.5 * (1 + math.cos(math.pi * (step - rise) / max(1, steps - rise)))
