"""Memory that the answer alone sees: a prompt but for its last token is computed without, and needs no second pass."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

import torch
from torch import Tensor
from transformers import DynamicCache

from selector.backbone.generation import Generation
from selector.backbone.injection import TensorMemory, injected
from selector.backbone.model import Backbone, Inputs


def generate_late(backbone: Backbone, prompt: Inputs, most: int, memory: TensorMemory) -> Generation:
    """Greedily, at most so many tokens, until an end-of-text token."""
    stop = backbone.model.generation_config.eos_token_id
    said, logprobs = list[int](), list[Tensor]()
    for scores in islice(_following(backbone, prompt, memory, said), most):
        token = int(scores.argmax())
        if token in (stop if isinstance(stop, list) else [stop]):
            break
        said.append(token)
        logprobs.append(scores[token])
    return Generation(said, torch.stack(logprobs) if logprobs else torch.zeros(0))


def score_late(backbone: Backbone, prompt: Inputs, answer: Sequence[int], memory: TensorMemory) -> Tensor:
    """Log-probabilities of the answer's tokens: [T]."""
    said, logprobs = list[int](), list[Tensor]()
    for token, scores in zip(answer, _following(backbone, prompt, memory, said), strict=False):
        said.append(token)
        logprobs.append(scores[token])
    return torch.stack(logprobs)


@torch.no_grad()
def _following(backbone: Backbone, prompt: Inputs, memory: TensorMemory, said: list[int]) -> Iterator[Tensor]:
    """The log-probabilities [vocabulary] of what follows the prompt and what is said by then, again and again."""
    model, cache, ids = backbone.model, DynamicCache(), prompt["input_ids"]  # [1, T]
    model(input_ids=ids[:, :-1], past_key_values=cache)
    terms, last = memory.terms(memory.retrieval_keys), ids[:, -1:]
    while True:
        with injected(memory, terms):
            logits = model(input_ids=last, past_key_values=cache).logits  # [1, 1, vocabulary]
        yield logits[0, -1].float().log_softmax(dim=-1)
        last = torch.tensor([said[-1:]])
