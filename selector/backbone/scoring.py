"""What the selector minimises: likelihood of the current task and of the anchors under weighted candidates.

Under `torchrun` the examples of a batch are split among the processes, and the gradients of w and phi summed.

Letters: N candidates, n examples of a batch, L layers, J KV heads, m payload tokens, D head size, d hidden size.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from inducekv_vllm.bundle import Bundle, EntryRecord
from inducekv_vllm.errors import TaskDataError
from inducekv_vllm.page_terms import Weighting

from ..data.examples import Example, entry_records
from ..paper.calibration import temperature, value_gates
from ..paper.candidate_pool import Pool
from ..runtime.distributed import all_reduce_sum, in_step, replicated, shard, summed, together
from .extraction import Extraction
from .injection import Memory, Terms, answer_logprobs, answer_tokens_logprobs
from .model import Backbone, Inputs

# Prefixes that are kept after their first use, so that images are not decoded in every step.
KEPT_PREFIXES = 512
# Times the examples of a training step that are measured at once: nothing is kept for a backward pass.
MEASURED_AT_ONCE = 4


@dataclass(frozen=True)
class Candidates:
    """The pool U: the previous memory's entries first, then the current task's (paper, Algorithm 1).

    First, so that between equal weights what the memory already holds stays. Payloads that lie in a pool on disk are
    mapped from there: only what is taken is copied.
    """

    keys: Tensor  # [N, d] float32, unit norm
    payload_keys: Tensor  # [L, N, J, m, D] float16: what a bundle stores is what is optimised over
    payload_values: Tensor  # [L, N, J, m, D] float16
    records: tuple[EntryRecord, ...]  # [N]
    num_previous: int
    pool: Pool | None = None  # of which the payloads are the maps

    @classmethod
    def join(cls, previous: Bundle | None, current: Extraction, examples: Sequence[Example]) -> Candidates:
        """`current` holds the entries of `examples`, in float16; its pool, if it has one, `previous` as well."""
        records = entry_records(examples)
        # A bundle rounds its keys: the pool's are rounded alike, old and new.
        keys = current.keys.half().float()
        num_previous = 0
        if previous is not None:
            keys = torch.cat([previous.retrieval_keys.float(), keys])
            records, num_previous = previous.metadata.entries + records, previous.num_entries
        if current.pool is not None:
            assert current.pool.num_previous == num_previous
            return cls(keys, *current.pool.mapped(), records, num_previous, current.pool)
        payload_keys, payload_values = current.payload_keys, current.payload_values
        if previous is not None:
            payload_keys = torch.cat([previous.payload_keys, payload_keys], dim=1)
            payload_values = torch.cat([previous.payload_values, payload_values], dim=1)
        return cls(keys, payload_keys, payload_values, records, num_previous)

    def __len__(self) -> int:
        return len(self.records)

    def take(self, rows: Tensor) -> Candidates:
        """The candidates of `rows` [K] int64, rising, with payloads of their own in memory."""
        if self.pool is not None:
            payload_keys, payload_values = self.pool.read(rows)
        else:
            payload_keys, payload_values = self.payload_keys[:, rows], self.payload_values[:, rows]
        return Candidates(
            self.keys[rows],
            payload_keys,
            payload_values,
            tuple(self.records[row] for row in rows.tolist()),
            int((rows < self.num_previous).sum()),
        )


@dataclass(frozen=True)
class Questions:
    """Examples to be answered with memory, with the keys they retrieve by."""

    examples: Sequence[Example]
    keys: Tensor  # [number of examples, d] float32, unit norm

    def __len__(self) -> int:
        return len(self.examples)


class Scorer:
    """Negative log-likelihood of answers under a memory, of a frozen backbone.

    `batch_size` is that of means and answers, which need no gradients.
    """

    def __init__(self, backbone: Backbone, *, batch_size: int = 8) -> None:
        self.backbone = backbone
        self.batch_size = batch_size
        self._prefixes: OrderedDict[str, Inputs] = OrderedDict()

    def answer_tokens(self, example: Example) -> list[int]:
        """The answer as the model must write it: its text, then the token that ends a turn."""
        tokenizer = self.backbone.processor.tokenizer
        tokens: list[int] = tokenizer(example.answer, add_special_tokens=False)["input_ids"]
        return tokens if tokenizer.eos_token_id is None else [*tokens, tokenizer.eos_token_id]

    def prefix(self, example: Example) -> Inputs:
        """The example's encoded prefix."""
        if example.source_digest not in self._prefixes:
            self._prefixes[example.source_digest] = self.backbone.encode_example(example)
        self._prefixes.move_to_end(example.source_digest)
        if len(self._prefixes) > KEPT_PREFIXES:
            self._prefixes.popitem(last=False)
        return self._prefixes[example.source_digest]

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

    def losses(self, examples: Sequence[Example], memory: Memory | None = None, terms: Terms | None = None) -> Tensor:
        """NLL of each example, summed over its answer's tokens (paper, Eq. nll_rewrite): [n], differentiable.

        Raises:
            TaskDataError: a loss is not a finite number, naming the examples.
        """
        return self.losses_of(examples, self.predicted(examples, memory, terms))

    def predicted(
        self, examples: Sequence[Example], memory: Memory | None = None, terms: Terms | None = None
    ) -> list[Tensor]:
        """log p of every token where each token of the answer is predicted: [answer tokens, vocabulary] each."""
        prompts = [self.prefix(example) for example in examples]
        answers = [self.answer_tokens(example) for example in examples]
        return answer_logprobs(self.backbone, prompts, answers, memory, terms)

    def losses_of(self, examples: Sequence[Example], predicted: Sequence[Tensor]) -> Tensor:
        """What `losses` gives, of what `predicted` gave."""
        logprobs = answer_tokens_logprobs(predicted, [self.answer_tokens(example) for example in examples])
        losses = torch.stack([-tokens.sum() for tokens in logprobs])
        if not losses.isfinite().all():
            wrong = [e.id for e, loss in zip(examples, losses.tolist(), strict=True) if not math.isfinite(loss)]
            raise TaskDataError(f"the loss is not a finite number for the examples {', '.join(map(repr, wrong))}")
        return losses

    @torch.no_grad()
    def mean_loss(self, questions: Questions, memory: Memory | None = None, log_prior: Tensor | None = None) -> float:
        """Mean NLL over all questions, with a memory or without. Collective; raises as `losses` does."""
        total = torch.zeros((), dtype=torch.float64)
        for mine in in_step(range(0, len(questions), self.batch_size)):
            with together():
                for start in mine:
                    rows = slice(start, start + self.batch_size)
                    terms = None if memory is None else memory.terms(questions.keys[rows], log_prior=log_prior)
                    total += self.losses(questions.examples[rows], memory, terms).double().sum().cpu()
        all_reduce_sum([total])
        return float(total) / len(questions)


@dataclass(frozen=True)
class Objective:
    """L_cur and L_anc of weights w and calibration phi, on batches that a seed and a number determine. Collective."""

    scorer: Scorer
    candidates: Candidates
    current: Questions
    anchors: Questions
    budget: int  # B
    weighting: Weighting
    batch_size: int
    seed: int

    def current_loss(self, weights: Tensor, phi: Tensor, batch: tuple[int, ...]) -> Tensor:
        """Mean NLL of the current task's batch number `batch` under w [N] and phi [1 + L] float64: []."""
        return self._loss(self.current, weights, phi, (0, *batch))

    def anchor_loss(self, weights: Tensor, phi: Tensor, batch: tuple[int, ...]) -> Tensor:
        """The same for the anchors, of which there must be some."""
        return self._loss(self.anchors, weights, phi, (1, *batch))

    def memory(self, phi: Tensor) -> Memory:
        """All candidates as one memory with the calibration `phi`."""
        candidates = self.candidates
        num_layers = candidates.payload_keys.shape[0]
        return Memory(
            retrieval_keys=candidates.keys,
            payload_keys=candidates.payload_keys,
            payload_values=candidates.payload_values,
            temperature=temperature(phi).to(candidates.keys),
            value_gates=value_gates(phi).to(candidates.keys),
            layer_bias=torch.zeros(num_layers, dtype=candidates.keys.dtype),
            weighting=self.weighting,
        )

    def _loss(self, questions: Questions, weights: Tensor, phi: Tensor, batch: tuple[int, ...]) -> Tensor:
        weights, phi = replicated(weights, phi)

        def losses(rows: list[int]) -> Tensor:
            memory = self.memory(phi)
            prior = log_prior(weights, self.budget).to(questions.keys)
            terms = memory.terms(questions.keys[rows], log_prior=prior)
            return self.scorer.losses([questions.examples[row] for row in rows], memory, terms)

        return mean_of_batch(batch_rows(len(questions), self.batch_size, self.seed, batch), losses)


def mean_of_batch(rows: list[int], losses: Callable[[list[int]], Tensor]) -> Tensor:
    """The mean over all rows of a batch of what `losses` gives for some of them, each process having its own: [].

    Collective. Parameters that `losses` depends on must be `replicated`.
    """
    # A process that is left without examples runs one that does not count: so all have the same graph.
    mine = shard(rows)
    counted = mine or rows[:1]
    with together():
        found = losses(counted)  # [len(counted)]
    return summed(found.sum() * (len(mine) / len(counted))) / len(rows)


def log_prior(weights: Tensor, budget: int) -> Tensor:
    """log pi_i = log(w_i / B) of `weights` [N]: exactly -inf where w_i = 0, with gradient 0 there and not NaN.

    An entry of pi = 0 has alpha = 0: under "sqrt" its tokens have logit 0 and value 0, under "prior" it is out.
    The derivative of sqrt(alpha) does not exist there; taken as 0, only the coverage term can bring such an entry back.
    """
    used = weights > 0
    return torch.where(used, (torch.where(used, weights, 1.0) / budget).log(), -math.inf)


def batch_rows(count: int, size: int, seed: int, batch: tuple[int, ...]) -> list[int]:
    """Rows of batch number `batch` of `count` examples: all where they fit in, else `size` drawn without repetition.

    The draw depends on nothing but its arguments, so a run that is resumed sees the batches it would have seen.
    """
    if count <= size:
        return list(range(count))
    rng = np.random.default_rng((seed, *batch))
    return sorted(rng.choice(count, size, replace=False).tolist())
