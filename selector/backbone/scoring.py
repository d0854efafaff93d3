"""The loss: negative log-likelihood of answers under a frozen model with a memory.

Shapes: n examples of a batch, B entries, d hidden size.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from cachetools import LRUCache
from torch import Tensor

from inducekv_vllm.backbone.placeholders import placeholder_ids
from inducekv_vllm.backbone.turns import answer_tokens
from inducekv_vllm.bundle.activation import Activation, first_active_position
from inducekv_vllm.errors import TaskDataError

from ..data.examples import Example
from .generation import answer_logprobs, answer_tokens_logprobs
from .injection import TensorMemory, Terms
from .model import Backbone, Inputs
from .tails import Tail, compute_tail, has_tails, tail_logprobs

CACHED_PREFIXES = 512  # encoded prefixes kept, so that images are not decoded in every step
CACHED_TAIL_BYTES = 2**30
EVALUATION_BATCHES = 4  # an evaluation batch is this many training batches: it keeps nothing for a backward pass


@dataclass(frozen=True)
class Questions:
    """Examples to answer, and the keys they retrieve with."""

    examples: Sequence[Example]
    keys: Tensor  # [number of examples, d] float32, unit norm
    first_active: Tensor | None = None  # [number of examples] int64, see `Terms`

    def __len__(self) -> int:
        return len(self.examples)

    def terms(self, memory: TensorMemory, rows: slice | list[int], log_prior: Tensor | None) -> Terms:
        """The memory's terms for these rows; `log_prior` is theirs, [B] or [number of rows, B]."""
        terms = memory.terms(self.keys[rows], log_prior=log_prior)
        return terms if self.first_active is None else replace(terms, first_active=self.first_active[rows])


class Scorer:
    """Scores answers with a frozen backbone. `batch_size` is for evaluation, which needs no gradients."""

    def __init__(self, backbone: Backbone, *, batch_size: int = 8) -> None:
        self.backbone = backbone
        self.batch_size = batch_size
        self._prefixes: LRUCache[str, Inputs] = LRUCache(CACHED_PREFIXES)
        self._tails: LRUCache[tuple[str, str, int], Tail] = LRUCache(CACHED_TAIL_BYTES, lambda tail: tail.nbytes)
        self.exact_tails: dict[tuple[bool, bool], bool] = {}  # by whether they start late and the prompt has images

    def answer_tokens(self, example: Example) -> list[int]:
        """The answer as the model must generate it: its text, then the end-of-turn token."""
        return answer_tokens(self.backbone.tokenizer, example.answer)

    def prefix(self, example: Example) -> Inputs:
        if (inputs := self._prefixes.get(example.source_digest)) is None:
            inputs = self._prefixes[example.source_digest] = self.backbone.encode_example(example)
        return inputs

    def first_active(self, examples: Sequence[Example], activations: Sequence[Activation]) -> Tensor:
        """The first position at which memory acts on each of n prefixes: [n] int64."""
        if set(activations) <= {"prompt"}:
            return torch.zeros(len(examples), dtype=torch.int64)
        placeholders = placeholder_ids(self.backbone.model.config)
        return torch.tensor(
            [
                first_active_position(activation, self.prefix(example)["input_ids"][0].tolist(), placeholders)
                for example, activation in zip(examples, activations, strict=True)
            ],
            dtype=torch.int64,
        )

    def require_context(self, example: Example) -> None:
        """Refuse an example whose prefix and answer together are longer than the model's context.

        Raises:
            TaskDataError: naming the example and both lengths.
        """
        limit = self.context
        length = self.prefix(example)["input_ids"].shape[1] + len(self.answer_tokens(example))
        if length > limit:
            raise TaskDataError(
                f"example {example.id!r} of task {example.task!r} has {length} tokens with its answer, "
                f"the model's context holds {limit}"
            )

    @property
    def context(self) -> int:
        """Tokens that the model's context holds."""
        limit: int = self.backbone.model.config.get_text_config(decoder=True).max_position_embeddings
        return limit

    def losses(
        self, examples: Sequence[Example], memory: TensorMemory | None = None, terms: Terms | None = None
    ) -> Tensor:
        """NLL of each example, summed over its answer's tokens (paper, Eq. nll_rewrite): [n], differentiable.

        Raises:
            TaskDataError: a loss is not a finite number, naming the examples.
        """
        return self.losses_of(examples, self.predicted(examples, memory, terms))

    def predicted(
        self, examples: Sequence[Example], memory: TensorMemory | None = None, terms: Terms | None = None
    ) -> list[Tensor]:
        """Log-probabilities at each position that predicts an answer token: [answer tokens, vocabulary] per example."""
        answers = [self.answer_tokens(example) for example in examples]
        starts, of_tails = [0] * len(examples), terms
        if terms is not None and terms.first_active is not None:
            starts, of_tails = terms.first_active.tolist(), replace(terms, first_active=None)
        if all(self._has_tails(example, start) for example, start in zip(examples, starts, strict=True)):
            tails = [self._tail(example, start) for example, start in zip(examples, starts, strict=True)]
            return tail_logprobs(self.backbone, tails, [len(answer) for answer in answers], memory, of_tails)
        prompts = [self.prefix(example) for example in examples]
        return answer_logprobs(self.backbone, prompts, answers, memory, terms)

    def _has_tails(self, example: Example, first_active: int) -> bool:
        """Whether tails are exact for this model, by the first example of each kind.

        A model that gives pictures to several layers has only tails that start after the last picture. A tail sees all
        of what is before it, so models with sliding windows have none, and hybrids none that start late.
        """
        if self.backbone.has_windows or (self.backbone.has_states and first_active):
            return False
        kind = (first_active > 0, bool(example.images))
        if kind not in self.exact_tails:
            prompt, answer = self.prefix(example), self.answer_tokens(example)
            self.exact_tails[kind] = has_tails(self.backbone, prompt, answer, first_active)
        return self.exact_tails[kind]

    def _tail(self, example: Example, first_active: int) -> Tail:
        key = (example.source_digest, example.answer, first_active)
        if (tail := self._tails.get(key)) is None:
            tail = compute_tail(self.backbone, self.prefix(example), self.answer_tokens(example), first_active)
            if tail.nbytes <= CACHED_TAIL_BYTES:
                self._tails[key] = tail
        return tail

    def losses_of(self, examples: Sequence[Example], predicted: Sequence[Tensor]) -> Tensor:
        """`losses` from the log-probabilities that `predicted` returned."""
        logprobs = answer_tokens_logprobs(predicted, [self.answer_tokens(example) for example in examples])
        return self.finite(examples, torch.stack([-tokens.sum() for tokens in logprobs]))

    def finite(self, examples: Sequence[Example], losses: Tensor) -> Tensor:
        """The losses [n] of n examples. Raises TaskDataError: one is not a finite number."""
        if not losses.isfinite().all():
            ids = [e.id for e, loss in zip(examples, losses.tolist(), strict=True) if not math.isfinite(loss)]
            raise TaskDataError(f"the loss is not a finite number for the examples {', '.join(map(repr, ids))}")
        return losses

    @torch.no_grad()
    def each_loss(
        self, questions: Questions, memory: TensorMemory | None = None, log_prior: Tensor | None = None
    ) -> Tensor:
        """NLL of each of n questions, with a memory or without: [n] float64 on the host. Raises as `losses` does."""
        losses = [torch.zeros(0, dtype=torch.float64)]
        for start in range(0, len(questions), self.batch_size):
            rows = slice(start, start + self.batch_size)
            terms = None if memory is None else questions.terms(memory, rows, log_prior)
            losses.append(self.losses(questions.examples[rows], memory, terms).double().cpu())
        return torch.cat(losses)

    def mean_loss(
        self, questions: Questions, memory: TensorMemory | None = None, log_prior: Tensor | None = None
    ) -> float:
        """Mean NLL over all questions; arguments and errors as for `each_loss`."""
        return float(self.each_loss(questions, memory, log_prior).mean())


def batch_rows(count: int, size: int, seed: int, batch: tuple[int, ...]) -> list[int]:
    """Rows of batch number `batch` of `count` examples: all of them if they fit, else `size` without replacement.

    The draw depends on its arguments alone, so a resumed run sees the same batches.
    """
    if count <= size:
        return list(range(count))
    rng = np.random.default_rng((seed, *batch))
    return sorted(rng.choice(count, size, replace=False).tolist())
