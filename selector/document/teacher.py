"""What the model says of the next token with a piece of the document in its context, and how far a memory is from it.

Shapes: a answer tokens, k top tokens of the teacher.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache

from ..backbone.model import Backbone, attention_named
from ..backbone.scoring import Scorer
from ..backbone.token_values import USUAL
from ..data.examples import Example


@dataclass(frozen=True)
class Lesson:
    """The teacher's most likely tokens at each position that predicts an answer token."""

    token_ids: Tensor  # [a, k] int32
    logprobs: Tensor  # [a, k] float32

    @classmethod
    def of(cls, logprobs: Tensor, top: int) -> Lesson:
        """From the log-probabilities of all tokens, [a, vocabulary]."""
        values, ids = logprobs.topk(min(top, logprobs.shape[1]), dim=-1)
        return cls(ids.int().cpu(), values.float().cpu())

    def says(self, tokens: Sequence[int]) -> bool:
        """Whether the likeliest token is that of the answer, at each of its positions."""
        return self.token_ids[:, 0].tolist() == list(tokens)

    def divergence(self, logprobs: Tensor) -> Tensor:
        """KL(teacher || student), summed over the positions: [], differentiable.

        All tokens that are not among the teacher's k are one outcome.

        Args:
            logprobs: [a, vocabulary] of the student.
        """
        of_teacher = self.logprobs.to(logprobs)
        of_student = logprobs.gather(1, self.token_ids.to(logprobs.device, torch.int64))  # [a, k]
        pairs = torch.stack([_with_rest(of_teacher), _with_rest(of_student)])  # [2, a, k + 1]
        return (pairs[0].exp() * (pairs[0] - pairs[1])).sum()


def _with_rest(logprobs: Tensor) -> Tensor:
    """[a, k] -> [a, k + 1]: the last is of all other tokens together."""
    rest = (1 - logprobs.exp().sum(dim=-1, keepdim=True)).clamp(min=1e-6).log()
    return torch.cat([logprobs, rest], dim=-1)


@torch.no_grad()
def logprobs_beside(scorer: Scorer, examples: Sequence[Example]) -> Iterator[Tensor]:
    """`Scorer.predicted` of each of n examples: [a, vocabulary]. What all prompts begin with is computed once."""
    backbone, size = scorer.backbone, scorer.batch_size
    batches = [examples[start : start + size] for start in range(0, len(examples), size)]
    if backbone.kind != "text" or backbone.has_windows or backbone.has_states:
        for batch in batches:
            yield from scorer.predicted(batch)
        return
    begun = _common([scorer.prefix(example)["input_ids"][0].tolist()[:-1] for example in examples])
    with attention_named(backbone, USUAL):
        first = torch.tensor([begun], device=backbone.device)
        kept = backbone.model.model(input_ids=first, use_cache=True).past_key_values if begun else None
        for batch in batches:
            answers = [scorer.answer_tokens(example) for example in batch]
            rests = [scorer.prefix(example)["input_ids"][0, len(begun) :].tolist() for example in batch]
            pairs = zip(rests, answers, strict=True)
            ids = pad_sequence([torch.tensor([*rest, *answer]) for rest, answer in pairs], batch_first=True)  # [n, T]
            positions = torch.arange(len(begun), len(begun) + ids.shape[1], device=backbone.device)
            states = backbone.model.model(
                input_ids=ids.to(backbone.device),  # padded on the right, where nothing sees it
                position_ids=positions.expand(len(ids), -1),
                past_key_values=_repeated(kept, len(ids)),
                use_cache=True,
            ).last_hidden_state
            for rest, answer, of_prompt in zip(rests, answers, states, strict=True):
                predicting = of_prompt[len(rest) - 1 : len(rest) - 1 + len(answer)]  # [a, d]
                yield backbone.model.get_output_embeddings()(predicting).float().log_softmax(dim=-1)


def _common(prompts: Sequence[Sequence[int]]) -> list[int]:
    """The tokens that all of several prompts begin with."""
    columns = zip(*prompts, strict=False)
    same = takewhile(lambda column: len(set(column)) == 1, columns)
    return [column[0] for column in same] if len(prompts) > 1 else []


def _repeated(kept: Any, n: int) -> DynamicCache:
    """What n prompts begin with, of which `kept` is one."""
    cache = DynamicCache()
    for number, layer in enumerate(kept.layers if kept is not None else ()):
        cache.update(layer.keys.expand(n, -1, -1, -1), layer.values.expand(n, -1, -1, -1), number)
    return cache


class Distilling(Scorer):
    """A scorer whose loss is not the answer's NLL, but how far the model is from its teacher while it says it."""

    def __init__(self, backbone: Backbone, lessons: Mapping[tuple[str, str], Lesson], *, batch_size: int = 8) -> None:
        """`lessons`: by an example's source digest and answer."""
        super().__init__(backbone, batch_size=batch_size)
        self._lessons = lessons

    def losses_of(self, examples: Sequence[Example], predicted: Sequence[Tensor]) -> Tensor:
        """[n]: KL(teacher || model) of each answer, summed over its tokens. Raises as `Scorer.losses_of` does."""
        lessons = [self._lessons[example.source_digest, example.answer] for example in examples]
        pairs = zip(lessons, predicted, strict=True)
        return self.finite(examples, torch.stack([lesson.divergence(logprobs) for lesson, logprobs in pairs]))
