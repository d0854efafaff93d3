"""Random memories for a backbone, and the settings that their retrieval is tested with."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from inducekv_vllm.retrieval.entry_terms import Weighting
from selector.backbone.generation import answer_logprobs
from selector.backbone.injection import TensorMemory, Terms
from selector.backbone.model import Backbone
from selector.backbone.scoring import Scorer
from selector.data.examples import Example
from tests.bundles import random_maps

B, M = 5, 3  # entries, payload tokens
PAYLOADS = ("payload_keys", "payload_values", "map_in", "map_out")


def every_setting(top_k: int) -> pytest.MarkDecorator:
    """Runs a test with both weightings, with all entries and with `top_k` of them, and with the remainder."""
    settings = [
        ("sqrt", {}),
        ("sqrt", {"top_k": top_k}),
        ("sqrt", {"top_k": top_k, "remainder": True}),
        ("prior", {}),
        ("prior", {"top_k": top_k}),
    ]
    return pytest.mark.parametrize(("weighting", "settings"), settings, ids=str)


def random_memory(backbone: Backbone, weighting: Weighting, dtype: torch.dtype = torch.float32) -> TensorMemory:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    L, J, D = backbone.num_layers, backbone.num_kv_heads, backbone.head_dim
    return TensorMemory(
        retrieval_keys=torch.nn.functional.normalize(draw(B, backbone.hidden_size), dim=1),
        payload_keys=draw(L, B, J, M, D),
        payload_values=draw(L, B, J, M, D),
        temperature=torch.tensor(0.1, dtype=dtype),
        value_gates=0.2 + 0.6 * draw(L).sigmoid(),
        layer_bias=0.5 * draw(L),
        weighting=weighting,
    )


def decoupled_memory(backbone: Backbone, value_scale: float = 1.0) -> TensorMemory:
    """With maps; some gates are negative."""
    memory = random_memory(backbone, "uniform")
    generator = torch.Generator().manual_seed(1)
    maps = random_maps(memory.payload_keys.shape, 2, backbone.num_heads // backbone.num_kv_heads, value_scale)
    return replace(
        memory,
        payload_values=value_scale * memory.payload_values,
        value_gates=torch.randn(backbone.num_layers, generator=generator),
        layer_bias=torch.randn(backbone.num_layers, generator=generator),
        form="decoupled",
        **maps,
    )


def entries(memory: TensorMemory, rows: Sequence[int]) -> TensorMemory:
    """A memory of these entries alone."""
    return replace(
        memory,
        retrieval_keys=memory.retrieval_keys[rows],
        payload_keys=memory.payload_keys[:, rows],
        payload_values=memory.payload_values[:, rows],
    )


def gradients(losses: Tensor, memory: TensorMemory) -> list[Tensor]:
    return list(torch.autograd.grad(losses.sum(), [getattr(memory, name) for name in PAYLOADS]))


def losses_of_whole(scorer: Scorer, examples: list[Example], memory: TensorMemory, terms: Terms) -> Tensor:
    """The losses of whole prompts."""
    prompts, answers = [scorer.prefix(e) for e in examples], [scorer.answer_tokens(e) for e in examples]
    return scorer.losses_of(examples, answer_logprobs(scorer.backbone, prompts, answers, memory, terms))
