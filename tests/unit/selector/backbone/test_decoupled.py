"""Decoupled injection: by hand, and inside a model."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from inducekv_vllm.bundle.activation import ACTIVATIONS, first_active_position
from selector.backbone.generation import generate, score
from selector.backbone.injection import TensorMemory, Terms, attend, attend_decoupled, injected, mapped
from selector.backbone.model import Backbone, Inputs
from selector.data.examples import read_task
from tests.unit.selector.backbone.memories import decoupled_memory, random_memory

T = 5


def test_one_head_by_hand() -> None:
    """Two entries of one token, D = 2, all numbers written out."""
    memory = TensorMemory(
        retrieval_keys=torch.zeros(2, 1),
        payload_keys=torch.tensor([[[[[1.0, 0.0]]], [[[0.0, 2.0]]]]]),
        payload_values=torch.tensor([[[[[10.0, 0.0]]], [[[0.0, 10.0]]]]]),
        temperature=torch.tensor(1.0),
        value_gates=torch.tensor([-1.25]),
        layer_bias=torch.tensor([-0.5]),
        weighting="prior",
        form="decoupled",
    )
    scales = torch.tensor([[0.6, 0.8]]), torch.tensor([[0.1, -0.2]]), torch.tensor([[0.7, 0.9]])
    terms = Terms(*scales, log_remainder=torch.tensor([-math.inf]))
    output = attend_decoupled(torch.tensor([[[[1.5, -1.0]]]]), 2.0, memory, terms, layer=0)
    first = math.exp(0.6 * (1.5 * 1.0) * 2.0 + 0.1 - 0.5)
    second = math.exp(0.8 * (-1.0 * 2.0) * 2.0 - 0.2 - 0.5)
    expected = [-1.25 * share * 10.0 / (first + second + 1) for share in (0.7 * first, 0.9 * second)]
    np.testing.assert_allclose(output.flatten().tolist(), expected, rtol=1e-6)


def test_a_map_by_hand() -> None:
    """One layer, two entries, two KV heads of two query heads of D = 1: what a loop over all of them gives."""
    generator = torch.Generator().manual_seed(0)
    map_in, map_out = (torch.randn(shape, generator=generator) for shape in ((1, 2, 2, 3, 2), (1, 2, 2, 2, 3)))
    zeros = torch.zeros(1, 2, 2, 1, 1)
    gate = torch.tensor([-1.25])
    memory = TensorMemory(
        torch.zeros(2, 1), zeros, zeros, torch.tensor(1.0), gate, gate, "prior", "decoupled", map_in, map_out
    )
    log_weight, value_scale = torch.tensor([[0.1, -math.inf], [-0.3, 0.2]]), torch.tensor([[0.7, 0.9], [1.1, 0.4]])
    terms = Terms(value_scale, log_weight, value_scale, torch.full((2,), -math.inf))
    own = torch.randn(2, 5, 4, 1, generator=generator)
    expected = torch.zeros(2, 5, 4, 1)
    for request, token, head, entry in np.ndindex(2, 5, 2, 2):
        block = own[request, token, 2 * head : 2 * head + 2, 0]
        added = map_out[0, entry, head] @ (map_in[0, entry, head] @ block)
        alpha = math.exp(log_weight[request, entry]) * value_scale[request, entry]
        expected[request, token, 2 * head : 2 * head + 2, 0] += -1.25 * alpha * added
    torch.testing.assert_close(mapped(own, memory, terms, layer=0), expected)


# Inside a model


@pytest.fixture(scope="module")
def prompts(backbone: Backbone, task_file: Path) -> list[Inputs]:
    return [backbone.encode_example(example) for example in read_task(task_file)[:3]]


def terms_of(memory: TensorMemory, backbone: Backbone, prompts: list[Inputs], first_active: list[int] | None) -> Terms:
    terms = memory.terms(torch.cat([backbone.retrieval_keys(prompt) for prompt in prompts]))
    return terms if first_active is None else replace(terms, first_active=torch.tensor(first_active))


ANSWER = [40, 71, 300, 112]


def test_values_of_zero_change_nothing_to_the_bit(backbone: Backbone, prompts: list[Inputs]) -> None:
    memory = decoupled_memory(backbone, value_scale=0.0)
    plain = score(backbone, prompts, [ANSWER] * 3)
    with_zeros = score(backbone, prompts, [ANSWER] * 3, memory, terms_of(memory, backbone, prompts, None))
    assert all(torch.equal(*pair) for pair in zip(plain, with_zeros, strict=True))


def test_memory_in_some_layers_is_memory_whose_values_are_0_in_the_others(
    backbone: Backbone, prompts: list[Inputs]
) -> None:
    whole, numbers = decoupled_memory(backbone), [0, backbone.num_layers - 1]
    assert whole.map_in is not None
    assert whole.map_out is not None
    names = ("payload_keys", "payload_values", "value_gates", "layer_bias", "map_in", "map_out")
    some = replace(whole, layers=tuple(numbers), **{name: getattr(whole, name)[numbers] for name in names})
    others = torch.ones(backbone.num_layers).index_fill(0, torch.tensor(numbers), 0).bool()
    zeros = {name: getattr(whole, name).clone() for name in ("payload_values", "map_out")}
    for tensor in zeros.values():
        tensor[others] = 0
    of_some, of_zeros = (
        score(backbone, prompts, [ANSWER] * 3, each, terms_of(each, backbone, prompts, [3, 0, 2]))
        for each in (some, replace(whole, **zeros))
    )
    plain = score(backbone, prompts, [ANSWER] * 3)
    for found, expected, without in zip(of_some, of_zeros, plain, strict=True):
        assert torch.equal(found, expected)
        assert (found - without).abs().max() > 1e-3


def test_nothing_changes_before_the_first_active_position(backbone: Backbone, prompts: list[Inputs]) -> None:
    """Memory that acts from position A on changes the hidden states from A on, and no earlier one by a bit."""
    memory = decoupled_memory(backbone)
    batch = backbone.collate(prompts)
    lengths = batch["attention_mask"].sum(dim=1).tolist()
    starts = [0, lengths[1] // 2, lengths[2] - 1]
    plain = backbone.hidden_states(batch)
    with injected(memory, terms_of(memory, backbone, prompts, starts)):
        changed = backbone.hidden_states(batch)
    for row, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        assert torch.equal(changed[row, :start], plain[row, :start])
        assert ((changed[row, start:length] - plain[row, start:length]).abs().amax(dim=1) > 1e-3).all()


def test_generation_and_scoring_agree_on_padded_prompts(backbone: Backbone, prompts: list[Inputs]) -> None:
    """Generation pads on the left and computes the prompt once; scoring pads on the right."""
    memory = decoupled_memory(backbone)
    lengths = [prompt["input_ids"].shape[1] for prompt in prompts]
    assert len(set(lengths)) > 1
    terms = terms_of(memory, backbone, prompts, [0, lengths[1] // 2, lengths[2] - 1])
    generations = generate(backbone, prompts, 5, memory, terms, ignore_eos=True)
    scored = score(backbone, prompts, [g.token_ids for g in generations], memory, terms)
    for generation, logprobs in zip(generations, scored, strict=True):
        torch.testing.assert_close(generation.logprobs, logprobs, rtol=0, atol=1e-4)


def test_first_active_positions() -> None:
    tokens, media = [5, 9, 9, 6, 9, 7, 8], {9}
    assert [first_active_position(activation, tokens, media) for activation in ACTIVATIONS] == [0, 5, 6]
    assert first_active_position("text", [1, 2, 3], media) == 0
    assert first_active_position("text", [1, 9], media) == 1  # a prompt that ends with a picture: its last token
    assert [first_active_position(activation, [4], media) for activation in ACTIVATIONS] == [0, 0, 0]


@pytest.mark.parametrize("form", ["merged", "decoupled"])
def test_one_layer_alone(form: str, llava: Backbone) -> None:
    """As its layer 0, it does what it does in its place, and gradients reach the whole memory: for layers elsewhere."""
    memory = decoupled_memory(llava) if form == "decoupled" else random_memory(llava, "prior")
    memory.payload_keys.requires_grad_()
    J, D = llava.num_kv_heads, llava.head_dim
    generator = torch.Generator().manual_seed(3)
    query = torch.randn(2, llava.num_heads, T, D, generator=generator)
    key, value = torch.randn(2, 2, J, T, D, generator=generator)
    own = torch.randn(2, T, llava.num_heads, D, generator=generator)
    terms = memory.terms(torch.nn.functional.normalize(torch.randn(2, llava.hidden_size, generator=generator), dim=1))
    visible = torch.ones(1, T, T, dtype=torch.bool).tril()

    def output(memory: TensorMemory, terms: Terms, layer: int) -> Tensor:
        if form == "merged":
            return attend(query, key, value, visible, 0.3, memory, terms, layer)
        return attend_decoupled(query, 0.3, memory, terms, layer) + mapped(own, memory, terms, layer)

    alone, moved = memory.of_layer(1, memory.payload_keys.device), terms.on(query.device)
    assert alone.payload_keys.shape == (1, *memory.payload_keys.shape[1:])
    assert torch.equal(output(alone, moved, 0), output(memory, terms, 1))
    gradients = [
        torch.autograd.grad(each.sum(), memory.payload_keys)[0]
        for each in (output(alone, moved, 0), output(memory, terms, 1))
    ]
    assert torch.equal(*gradients)
    assert gradients[0][1].any()
