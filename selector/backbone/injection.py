"""Run a frozen transformers model with injected memory: the plain, differentiable truth the server is tested against.

Letters: n requests, B entries, m payload tokens, L layers, H query heads, J KV heads, G = H / J, D head size,
d hidden size, T query tokens, S tokens of the request itself that they may see.

Entry i enters layer l of a request with three numbers (design: the general form; the paper's Eq. inject_rewrite is
`weighting="sqrt"` with zero layer bias):

    logit = key_scale_i * (q . k) * softmax_scale + log_weight_i + layer_bias_l
    value = value_scale_i * gate_l * v

Memory keys are not rotated and meet rotated queries: memory stands at position 0 and moves no position of the request.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from inducekv_vllm.bundle import Bundle, Gate
from inducekv_vllm.errors import ConfigError, UnsupportedModel
from inducekv_vllm.page_terms import PageTerms, Weighting

if TYPE_CHECKING:
    from .model import Backbone, Inputs

ATTENTION_NAME = "inducekv"
# A processor's outputs with a value for each token; all others are images'.
TOKEN_INPUTS = ("input_ids", "attention_mask", "mm_token_type_ids", "token_type_ids")


@dataclass(frozen=True)
class Terms:
    """The numbers with which each entry enters attention, for each request; -inf in `log_weight` leaves it out."""

    key_scale: Tensor  # [n, B]
    log_weight: Tensor  # [n, B]
    value_scale: Tensor  # [n, B]
    log_remainder: Tensor  # [n], -inf for none: the logit, less the layer bias, of one more token of value 0

    @classmethod
    def from_pages(cls, pages: Sequence[PageTerms], num_entries: int) -> Terms:
        """From the terms that `inducekv_vllm.page_terms.page_terms` gives for the retrieved entries of n requests."""
        shape = (len(pages), num_entries)
        key_scale, value_scale = torch.zeros(shape), torch.zeros(shape)
        log_weight = torch.full(shape, -math.inf)
        for row, page in enumerate(pages):
            entries = torch.from_numpy(page.entries)
            key_scale[row, entries] = torch.from_numpy(page.key_scale)
            log_weight[row, entries] = torch.from_numpy(page.log_weight)
            value_scale[row, entries] = torch.from_numpy(page.value_scale)
        return cls(key_scale, log_weight, value_scale, torch.tensor([page.log_remainder for page in pages]))


@dataclass(frozen=True)
class Memory:
    """A memory as tensors that may carry gradients: any of them may be replaced by one that requires them."""

    retrieval_keys: Tensor  # [B, d]
    payload_keys: Tensor  # [L, B, J, m, D], before RoPE
    payload_values: Tensor  # [L, B, J, m, D]
    temperature: Tensor  # []
    value_gates: Tensor  # [L]
    layer_bias: Tensor  # [L]
    weighting: Weighting

    @classmethod
    def from_bundle(
        cls, bundle: Bundle, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu"
    ) -> Memory:
        return cls(
            retrieval_keys=bundle.retrieval_keys.to(device, dtype),
            payload_keys=bundle.payload_keys.to(device, dtype),
            payload_values=bundle.payload_values.to(device, dtype),
            temperature=bundle.temperature.to(device, dtype),
            value_gates=bundle.value_gates.to(device, dtype),
            layer_bias=bundle.layer_bias.to(device, dtype),
            weighting=bundle.metadata.weighting,
        )

    def terms(
        self,
        query_keys: Tensor,
        *,
        top_k: int | None = None,
        remainder: bool = False,
        log_prior: Tensor | None = None,
    ) -> Terms:
        """Retrieve: softmax over all B entries, or over the `top_k` of highest score, renormalised.

        Args:
            query_keys: [n, d], unit norm.
            remainder: for "sqrt" only: the entries left out stay in attention as tokens of logit 0 and value 0.
            log_prior: [B] or [n, B], added to the retrieval logits: log pi of the selection, -inf leaves an entry out.

        Raises:
            ConfigError: `top_k` below 1, or `remainder` with another weighting.
        """
        if top_k is not None and top_k < 1:
            raise ConfigError(f"top_k must be at least 1, found {top_k}")
        if remainder and self.weighting != "sqrt":
            raise ConfigError('the zero-logit remainder exists for the weighting "sqrt" only')
        scores = query_keys.to(self.retrieval_keys) @ self.retrieval_keys.T  # [n, B]
        logits = scores / self.temperature
        if log_prior is not None:
            logits = logits + log_prior
        # A stable sort: among equal scores the entry that stands first in the memory is retrieved.
        rank = logits.argsort(dim=1, descending=True, stable=True).argsort(dim=1)  # [n, B]
        left_out = rank >= (top_k if top_k is not None else logits.shape[1])  # [n, B] bool
        log_alpha = logits.masked_fill(left_out, -math.inf).log_softmax(dim=1)  # [n, B]

        num_left_out = left_out.sum(dim=1).to(logits)  # [n]
        m = self.payload_keys.shape[3]
        if self.weighting == "prior":
            ones = torch.ones_like(log_alpha)
            return Terms(ones, log_alpha, ones, torch.full_like(num_left_out, -math.inf))
        # exp(log / 2) and not sqrt: its gradient stays finite where alpha is 0.
        scale = (0.5 * log_alpha).exp()
        log_weight = torch.zeros_like(scale).masked_fill(left_out, -math.inf)
        log_remainder = (num_left_out * m).log() if remainder else torch.full_like(num_left_out, -math.inf)
        return Terms(scale, log_weight, scale, log_remainder)


def gated_prior(gate: Gate, entry_tasks: Sequence[str], query_keys: Tensor) -> tuple[Tensor, Tensor]:
    """The relevance gate for n requests; the rule is `inducekv_vllm.gate.RelevanceGate.judge`.

    Args:
        entry_tasks: the task of each of the B entries.
        query_keys: [n, 2, d], what `Backbone.query_keys` gives.

    Returns:
        open [n] bool: where false, the request runs without memory;
        log_prior [n, B] float32, for `Memory.terms`: 0 for the entries of the request's task, -inf for all others. A
        closed request's row is that of its nearest task, so that it has finite terms, which are not to be used.

    Raises:
        ConfigError: query keys of another shape, or an entry of a task that the gate does not have.
    """
    if query_keys.ndim != 3 or query_keys.shape[1:] != gate.keys.shape[1:]:
        raise ConfigError(f"expected query keys [n, 2, {gate.keys.shape[2]}], found {list(query_keys.shape)}")
    if unknown := set(entry_tasks) - set(gate.tasks):
        raise ConfigError(f"entries of task {min(unknown)!r}, which the gate does not have")
    keys, thresholds = gate.keys.to(query_keys.device, torch.float64), gate.thresholds.to(query_keys.device)
    margins = torch.einsum("npd,cpd->nc", query_keys.double(), keys) - thresholds.double()  # [n, C]
    largest, nearest = margins.amax(dim=1), margins.argmax(dim=1)  # [n], [n]: the first of equal ones
    task_of_entry = torch.tensor([gate.tasks.index(task) for task in entry_tasks], device=nearest.device)  # [B]
    other_task = task_of_entry != nearest[:, None]  # [n, B] bool
    log_prior = torch.zeros(other_task.shape, device=nearest.device).masked_fill(other_task, -math.inf)
    return largest >= 0, log_prior


def routing(bundle: Bundle, query_keys: Tensor) -> tuple[Tensor, Tensor]:
    """Which of n requests get a bundle's memory, [n] bool, and the prior of its entries, [n, B] float32.

    What `gated_prior` gives; without a gate, all entries for every request.
    """
    n, device = len(query_keys), query_keys.device
    if bundle.gate is None:
        return torch.ones(n, dtype=torch.bool, device=device), torch.zeros(n, bundle.num_entries, device=device)
    return gated_prior(bundle.gate, [entry.task for entry in bundle.metadata.entries], query_keys)


@dataclass(frozen=True)
class Generation:
    """A greedy continuation."""

    token_ids: list[int]
    logprobs: Tensor  # [len(token_ids)] float32


_injected: ContextVar[tuple[Memory, Terms] | None] = ContextVar("injected", default=None)


@contextlib.contextmanager
def injected(memory: Memory, terms: Terms) -> Iterator[None]:
    """Inside, every forward pass of a `Backbone` over n requests attends to the memory with those requests' terms."""
    token = _injected.set((memory, terms))
    try:
        yield
    finally:
        _injected.reset(token)


def attention_with(attend: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, None]]:
    """The language model's attention, which transformers calls, with `attend` (or one like it) for memory.

    Without memory it is transformers' own, to the bit.
    """

    def attention(
        module: torch.nn.Module,
        query: Tensor,  # [n, H, T, D], rotated
        key: Tensor,  # [n, J, S, D], rotated
        value: Tensor,  # [n, J, S, D]
        attention_mask: Tensor | None,
        scaling: float,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        active = _injected.get()
        if active is None:
            return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
        for name in ("softcap", "s_aux", "sliding_window", "position_bias"):
            if kwargs.get(name) is not None:
                raise UnsupportedModel(f"memory cannot be injected into attention with {name}")
        memory, terms = active
        assert terms.key_scale.shape == (query.shape[0], memory.retrieval_keys.shape[0])
        visible = _visible(attention_mask, query, key)
        # Whatever precision the model's own products have: attention over memory is computed in at least float32.
        with torch.autocast(query.device.type, enabled=False):
            output = attend(query, key, value, visible, scaling, memory, terms, module.layer_idx)
        return output.to(query.dtype), None

    return attention


def attend(
    query: Tensor,  # [n, H, T, D]
    key: Tensor,  # [n, J, S, D]
    value: Tensor,  # [n, J, S, D]
    visible: Tensor,  # [n or 1, T, S] bool: which tokens of the request a query may see
    scaling: float,
    memory: Memory,
    terms: Terms,
    layer: int,
) -> Tensor:
    """One softmax over [memory ; remainder ; self], computed in at least float32. Returns [n, T, H, D]."""
    n, H, T, D = query.shape
    J, S = key.shape[1:3]
    dtype = torch.promote_types(query.dtype, torch.float32)
    query = query.to(dtype).view(n, J, H // J, T, D)
    key, value = key.to(dtype), value.to(dtype)
    memory_key, memory_value = memory.payload_keys[layer].to(dtype), memory.payload_values[layer].to(dtype)
    bias = memory.layer_bias[layer].to(dtype)

    def per_entry(term: Tensor) -> Tensor:
        return term.to(dtype)[:, None, None, None, :, None]  # [n, 1, 1, 1, B, 1]

    memory_logits = torch.einsum("njgtd,bjmd->njgtbm", query, memory_key) * scaling  # [n, J, G, T, B, m]
    memory_logits = memory_logits * per_entry(terms.key_scale) + per_entry(terms.log_weight) + bias
    remainder_logits = (terms.log_remainder.to(dtype) + bias)[:, None, None, None, None]
    remainder_logits = remainder_logits.expand(n, J, H // J, T, 1)
    self_logits = torch.einsum("njgtd,njsd->njgts", query, key) * scaling  # [n, J, G, T, S]
    self_logits = self_logits.masked_fill(~visible[:, None, None], -math.inf)

    logits = torch.cat([memory_logits.flatten(-2), remainder_logits, self_logits], dim=-1)
    share = logits.softmax(dim=-1)  # [n, J, G, T, B m + 1 + S]
    memory_share = share[..., : -1 - S].view_as(memory_logits) * per_entry(terms.value_scale)  # [n, J, G, T, B, m]
    self_share = share[..., -S:]  # [n, J, G, T, S]
    gate = memory.value_gates[layer].to(dtype)
    output = gate * torch.einsum("njgtbm,bjmd->njgtd", memory_share, memory_value)
    output = output + torch.einsum("njgts,njsd->njgtd", self_share, value)
    return output.reshape(n, H, T, D).transpose(1, 2)


def _visible(attention_mask: Tensor | None, query: Tensor, key: Tensor) -> Tensor:
    """transformers' mask as [n or 1, T, S] bool; it hands over None where plain causal masking is meant."""
    if attention_mask is None:
        T, S = query.shape[2], key.shape[2]
        return torch.ones(T, S, dtype=torch.bool, device=query.device).tril(S - T)[None]
    assert attention_mask.dtype == torch.bool
    assert attention_mask.shape[1] == 1
    return attention_mask[:, 0, :, : key.shape[2]]


@contextlib.contextmanager
def attention_named(backbone: Backbone, name: str) -> Iterator[None]:
    """Inside, the backbone's language model uses the attention that is registered under `name` in transformers."""
    text = backbone.model.config.get_text_config(decoder=True)
    before = text._attn_implementation
    text._attn_implementation = name
    try:
        yield
    finally:
        text._attn_implementation = before


attention = attention_with(attend)
AttentionInterface.register(ATTENTION_NAME, attention)
AttentionMaskInterface.register(ATTENTION_NAME, sdpa_mask)


def score(
    backbone: Backbone,
    prompts: Sequence[Inputs],
    answers: Sequence[Sequence[int]],
    memory: Memory | None = None,
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
    """Of what `answer_logprobs` gives, each request's answer tokens' own: [number of its answer tokens] float32."""
    logprobs = []
    for rows, answer in zip(predicted, answers, strict=True):
        tokens = torch.as_tensor(answer, dtype=torch.int64, device=rows.device)[:, None]
        logprobs.append(rows.gather(1, tokens)[:, 0])
    return logprobs


def answer_logprobs(
    backbone: Backbone,
    prompts: Sequence[Inputs],
    answers: Sequence[Sequence[int]],
    memory: Memory | None = None,
    terms: Terms | None = None,
) -> list[Tensor]:
    """log p(every token | prompt, earlier answer tokens) where each answer token is predicted; arguments as in `score`.

    Returns:
        For each request [number of its answer tokens, vocabulary] float32.
    """
    batch = backbone.collate([_extend(prompt, len(answer)) for prompt, answer in zip(prompts, answers, strict=True)])
    with _injecting(memory, terms), _embedding_answers(backbone, prompts, answers):
        logits = backbone.model(**batch, use_cache=False).logits  # [n, T, vocabulary]
    logprobs = []
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        first = prompt["input_ids"].shape[1] - 1  # the position that predicts the first answer token
        predicted = logits[row, first : first + len(answer)]
        predicted = predicted.to(torch.promote_types(predicted.dtype, torch.float32))
        logprobs.append(predicted.log_softmax(dim=-1))
    return logprobs


@torch.no_grad()
def generate(
    backbone: Backbone,
    prompts: Sequence[Inputs],
    max_new_tokens: int,
    memory: Memory | None = None,
    terms: Terms | None = None,
    *,
    ignore_eos: bool = False,
) -> list[Generation]:
    """Greedy generation with the KV cache, for n prompts; arguments as in `score`. Ends after an end-of-text token."""
    batch = backbone.collate(prompts, side="left")
    stop = backbone.model.generation_config.eos_token_id
    stop = [] if ignore_eos or stop is None else stop if isinstance(stop, list) else [stop]
    with _injecting(memory, terms):
        model: Any = backbone.model
        result = model.generate(
            **batch,
            max_new_tokens=max_new_tokens,
            # Whatever a checkpoint's own generation settings say: plain arg max, and every logit untouched.
            do_sample=False,
            num_beams=1,
            repetition_penalty=1.0,
            eos_token_id=stop or None,
            pad_token_id=backbone.processor.tokenizer.pad_token_id or 0,
            return_dict_in_generate=True,
            output_logits=True,
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


@torch.no_grad()
def reference_logprobs(
    backbone: Backbone,
    bundle: Bundle,
    prompt: Inputs,
    token_ids: Sequence[int],
    *,
    top_k: int | None = None,
    remainder: bool = False,
) -> Tensor:
    """What a server with this bundle must answer: log p of given tokens after a prompt, [len(token_ids)] float32.

    Both passes of the method: the prompt's key from the untouched model, then the tokens under the memory it retrieves,
    or under the untouched model where the bundle's relevance gate is closed.
    """
    memory = Memory.from_bundle(bundle, device=backbone.device)
    query_keys = backbone.query_keys(prompt)  # [1, 2, d]
    is_open, log_prior = routing(bundle, query_keys)
    if not is_open[0]:
        return score(backbone, [prompt], [token_ids])[0]
    terms = memory.terms(query_keys[:, 0], top_k=top_k, remainder=remainder, log_prior=log_prior)
    return score(backbone, [prompt], [token_ids], memory, terms)[0]


def _injecting(memory: Memory | None, terms: Terms | None) -> contextlib.AbstractContextManager[None]:
    assert (memory is None) == (terms is None), "memory and terms come together"
    return injected(memory, terms) if memory is not None and terms is not None else contextlib.nullcontext()


def _extend(prompt: Inputs, length: int) -> Inputs:
    """The prompt with room for `length` text tokens after it: its last token (a text token) again and again."""
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
    """Inside, a forward pass embeds the answers in the room made for them.

    Answers stay out of `input_ids`: a model may well generate the number of its image placeholder, and means no image.
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
