"""Log-probabilities and greedy generation of a frozen model, with injected memory or without.

Shapes: n requests, T prompt tokens.
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList

from inducekv_vllm.backbone.saying import next_token, said

from .injection import TensorMemory, Terms, injected
from .model import TOKEN_INPUTS, Backbone, Inputs


@dataclass(frozen=True)
class Generation:
    """A greedy continuation."""

    token_ids: list[int]
    logprobs: Tensor  # [len(token_ids)] float32


def score(
    backbone: Backbone,
    prompts: Sequence[Inputs],
    answers: Sequence[Sequence[int]],
    memory: TensorMemory | None = None,
    terms: Terms | None = None,
) -> list[Tensor]:
    """log p(answer token | prompt, earlier answer tokens), for n prompts in one differentiable forward pass.

    Args:
        prompts: what `Backbone.encode` gives, one for each request.
        answers: token ids.
        memory, terms: both, with a row of terms for each request, or neither for the plain model.

    Returns:
        For each request [number of its answer tokens] float32.
    """
    return answer_tokens_logprobs(answer_logprobs(backbone, prompts, answers, memory, terms), answers)


def answer_tokens_logprobs(predicted: Sequence[Tensor], answers: Sequence[Sequence[int]]) -> list[Tensor]:
    """The answer tokens' log-probabilities from those of all tokens: [number of answer tokens] float32 per request."""
    logprobs = []
    for rows, answer in zip(predicted, answers, strict=True):
        tokens = torch.as_tensor(answer, dtype=torch.int64, device=rows.device)[:, None]
        logprobs.append(rows.gather(1, tokens)[:, 0])
    return logprobs


def answer_logprobs(
    backbone: Backbone,
    prompts: Sequence[Inputs],
    answers: Sequence[Sequence[int]],
    memory: TensorMemory | None = None,
    terms: Terms | None = None,
) -> list[Tensor]:
    """log p(every token | prompt, earlier answer tokens) at each answer token's position; arguments as in `score`.

    Returns:
        For each request [number of its answer tokens, vocabulary] float32.
    """
    with injecting(memory, terms):
        logits = forward_with_answers(backbone, prompts, answers, use_cache=False).logits  # [n, T, vocabulary]
    logprobs = []
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        first = prompt["input_ids"].shape[1] - 1  # the position that predicts the first answer token
        predicted = logits[row, first : first + len(answer)]
        predicted = predicted.to(torch.promote_types(predicted.dtype, torch.float32))
        logprobs.append(predicted.log_softmax(dim=-1))
    return logprobs


def forward_with_answers(
    backbone: Backbone, prompts: Sequence[Inputs], answers: Sequence[Sequence[int]], **options: Any
) -> Any:
    """The model's output over n prompts, each followed by its answer, padded on the right."""
    batch = backbone.collate([_extend(prompt, len(answer)) for prompt, answer in zip(prompts, answers, strict=True)])
    with _embedding_answers(backbone, prompts, answers):
        return backbone.model(**batch, **options)


@torch.no_grad()
def generate(
    backbone: Backbone,
    prompts: Sequence[Inputs],
    max_new_tokens: int,
    memory: TensorMemory | None = None,
    terms: Terms | None = None,
    *,
    ignore_eos: bool = False,
    answers: Sequence[Sequence[int] | None] = (),
) -> list[Generation]:
    """Greedy generation with the KV cache, until an end-of-text token; arguments as in `score`.

    `answers` are stored ones of n prompts, in tokens, which are said; the log-probabilities are the model's own.
    """
    batch = backbone.collate(prompts, side="left")
    if terms is not None and terms.first_active is not None:
        padding = (batch["attention_mask"] == 0).sum(dim=1)  # [n]
        terms = replace(terms, first_active=terms.first_active.to(padding.device) + padding)
    stop = backbone.model.generation_config.eos_token_id
    stop = [] if ignore_eos or stop is None else stop if isinstance(stop, list) else [stop]
    with injecting(memory, terms):
        model: Any = backbone.model
        result = model.generate(
            **batch,
            max_new_tokens=max_new_tokens,
            # Overrides the checkpoint's generation settings: plain argmax, no logits processors.
            do_sample=False,
            num_beams=1,
            repetition_penalty=1.0,
            eos_token_id=stop or None,
            pad_token_id=backbone.tokenizer.pad_token_id or 0,
            return_dict_in_generate=True,
            output_logits=True,
            logits_processor=LogitsProcessorList([_Following(answers, batch["input_ids"].shape[1])] if answers else []),
        )
    tokens = result.sequences[:, batch["input_ids"].shape[1] :]  # [n, steps]
    logprobs = torch.stack(result.logits, dim=1).float().log_softmax(dim=-1)  # [n, steps, vocabulary]
    generations = []
    for row in range(len(prompts)):
        ids = tokens[row].tolist()
        length = next((at + 1 for at, token in enumerate(ids) if token in stop), len(ids))
        chosen = logprobs[row, :length].gather(1, tokens[row, :length, None])[:, 0]
        generations.append(Generation(ids[:length], chosen))
    return generations


class _Following(LogitsProcessor):
    def __init__(self, answers: Sequence[Sequence[int] | None], prompt_length: int) -> None:
        self._answers, self._begin = answers, prompt_length

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """input_ids [n, T], scores [n, vocabulary]"""
        rows = zip(input_ids[:, self._begin :].tolist(), scores, self._answers, strict=True)
        tokens = [(row, None if answer is None else next_token(answer, ids)) for ids, row, answer in rows]
        return torch.stack([row if token is None else said(row, token) for row, token in tokens])


def injecting(memory: TensorMemory | None, terms: Terms | None) -> contextlib.AbstractContextManager[None]:
    assert (memory is None) == (terms is None), "memory and terms come together"
    return injected(memory, terms) if memory is not None and terms is not None else contextlib.nullcontext()


def _extend(prompt: Inputs, length: int) -> Inputs:
    """The prompt followed by `length` copies of its last token, as room for an answer."""
    extended = dict(prompt)
    fillers = {"input_ids": int(prompt["input_ids"][0, -1]), "attention_mask": 1}
    for name in TOKEN_INPUTS:
        if name in prompt:
            extended[name] = torch.nn.functional.pad(prompt[name], (0, length), value=fillers.get(name, 0))
    return extended


@contextlib.contextmanager
def _embedding_answers(
    backbone: Backbone, prompts: Sequence[Inputs], answers: Sequence[Sequence[int]]
) -> Iterator[None]:
    """Within the context, a forward pass embeds the answers in the room after the prompts.

    Answers stay out of `input_ids`, because a model may generate the token id of its image placeholder.
    """

    def embed(module: Any, arguments: Any, output: Tensor) -> Tensor:  # output [n, T, d]
        output = output.clone()
        for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
            tokens = torch.as_tensor(answer, dtype=torch.int64, device=output.device)
            first = prompt["input_ids"].shape[1]
            output[row, first : first + len(answer)] = module.forward(tokens)
        return output

    handle = backbone.model.get_input_embeddings().register_forward_hook(embed)
    try:
        yield
    finally:
        handle.remove()
