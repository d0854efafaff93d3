"""Extraction against brute force: an own forward pass of each layer, an own pooling loop."""

import pytest
import torch
from torch import Tensor

from selector.backbone.extraction import extract, extract_keys, pooling_matrices
from selector.backbone.loading import decoder
from selector.backbone.model import Backbone
from selector.data.examples import Example


def segments(T: int, m: int) -> list[list[int]]:
    """The tokens of each segment, by the words of the design."""
    if m > T:
        return [[s * T // m] for s in range(m)]
    size = T // m
    bounds = [s * size for s in range(m)] + [T]
    return [list(range(bounds[s], bounds[s + 1])) for s in range(m)]


@pytest.mark.parametrize("m", [1, 2, 5, 8])
def test_segments(m: int) -> None:
    lengths = [1, 2, 3, 7, 8, 9, 15, 16, 17, 64]
    matrices = pooling_matrices(lengths, m)
    assert matrices.shape == (len(lengths), m, 64)
    for matrix, T in zip(matrices, lengths, strict=True):
        for s, tokens in enumerate(segments(T, m)):
            assert matrix[s].nonzero()[:, 0].tolist() == tokens
            torch.testing.assert_close(matrix[s, tokens], torch.full((len(tokens),), 1 / len(tokens)))


def brute_force_payload(backbone: Backbone, inputs: dict[str, Tensor], m: int) -> tuple[Tensor, Tensor]:
    """Keys and values [L, J, m, D] recomputed in float64 from the layers' inputs, by the paper's formula."""
    layers = decoder(backbone.model).layers
    layer_inputs: list[Tensor] = []
    handles = [
        layer.register_forward_pre_hook(lambda module, arguments: layer_inputs.append(arguments[0])) for layer in layers
    ]
    backbone.model(**inputs)
    for handle in handles:
        handle.remove()
    keys, values = [], []
    for layer_input, decoder_layer in zip(layer_inputs, layers, strict=True):
        attention = decoder_layer.self_attn
        x = layer_input[0].double()  # [T, d]
        x = x * (x.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt() * decoder_layer.input_layernorm.weight.double()
        k = (x @ attention.k_proj.weight.double().T).view(len(x), backbone.num_kv_heads, backbone.head_dim)
        if hasattr(attention, "k_norm"):
            k = k * (k.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt() * attention.k_norm.weight.double()
        v = (x @ attention.v_proj.weight.double().T).view(len(x), backbone.num_kv_heads, backbone.head_dim)
        keys.append(torch.stack([k[tokens].mean(dim=0) for tokens in segments(len(x), m)], dim=1))
        values.append(torch.stack([v[tokens].mean(dim=0) for tokens in segments(len(x), m)], dim=1))
    return torch.stack(keys), torch.stack(values)


@pytest.mark.parametrize("m", [8, 80])  # 80 exceeds the prompts' length
def test_extraction_is_the_formula(backbone: Backbone, examples: list[Example], m: int) -> None:
    result = extract(backbone, examples[:5], m, batch_size=2)
    assert result.keys.shape == (5, backbone.hidden_size)
    assert result.payload_keys.shape == (backbone.num_layers, 5, backbone.num_kv_heads, m, backbone.head_dim)
    assert result.payload_values.shape == result.payload_keys.shape
    for number, example in enumerate(examples[:5]):
        inputs = backbone.encode_example(example)
        keys, values = brute_force_payload(backbone, inputs, m)
        torch.testing.assert_close(result.payload_keys[:, number].double(), keys, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(result.payload_values[:, number].double(), values, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(result.keys[number], backbone.retrieval_keys(inputs)[0], rtol=0, atol=2e-6)
    torch.testing.assert_close(result.keys.norm(dim=1), torch.ones(5))


def test_batch_size_changes_nothing(backbone: Backbone, examples: list[Example]) -> None:
    alone, together = (extract(backbone, examples, 4, batch_size=size) for size in (1, 12))
    torch.testing.assert_close(alone.keys, together.keys, rtol=0, atol=2e-6)
    for name in ("payload_keys", "payload_values"):
        torch.testing.assert_close(getattr(alone, name), getattr(together, name), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(extract_keys(backbone, examples, batch_size=5), together.keys, rtol=0, atol=2e-6)


def num_hooks(backbone: Backbone) -> int:
    return sum(len(part._forward_hooks) for layer in backbone.attention_layers() for part in layer.modules())


def test_hooks_are_gone_afterwards_and_float16_is_the_rounding(llava: Backbone, examples: list[Example]) -> None:
    full = extract(llava, examples[:2], 4)
    half = extract(llava, examples[:2], 4, payload_dtype=torch.float16)
    assert torch.equal(half.payload_keys, full.payload_keys.half())
    assert num_hooks(llava) == 0
