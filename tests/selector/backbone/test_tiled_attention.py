"""Tiled attention and plain concatenation against `injection.attend`, in outputs and in every gradient."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import selector.backbone.tiled_attention as module
from benchmarks.selector.tiled_attention import attend_concatenated
from inducekv_vllm.page_terms import Weighting
from selector.backbone.generation import score
from selector.backbone.injection import Memory, attend
from selector.backbone.model import Backbone
from selector.backbone.tiled_attention import attend_tiled, memory_attention, tiled_attention
from selector.data.examples import read_task
from selector.paper.calibration import leaf

Attend = Callable[..., Tensor]
n, H, J, T, S, D, d, N, m, L = 3, 4, 2, 5, 7, 16, 12, 40, 3, 2
VARIABLES = (
    "query",
    "key",
    "value",
    "retrieval_keys",
    "payload_keys",
    "payload_values",
    "temperature",
    "value_gates",
    "layer_bias",
    "log_prior",
)
SETTINGS: list[tuple[Weighting, dict[str, Any]]] = [
    ("sqrt", {}),
    ("sqrt", {"top_k": 9}),
    ("sqrt", {"top_k": 9, "remainder": True}),
    ("prior", {}),
    ("prior", {"top_k": 9}),
]
all_settings = pytest.mark.parametrize(("weighting", "settings"), SETTINGS, ids=lambda value: str(value))


def case(dtype: torch.dtype, variables: tuple[str, ...] = VARIABLES, zeros: int = 0) -> dict[str, Tensor]:
    """Inputs by name, those in `variables` requiring gradients; `zeros` entries have selection weight 0."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    log_prior = draw(N).log_softmax(0)
    log_prior[:zeros] = -math.inf
    inputs = {
        "query": draw(n, H, T, D),
        "key": draw(n, J, S, D),
        "value": draw(n, J, S, D),
        "retrieval_keys": torch.nn.functional.normalize(draw(N, d), dim=1),
        "payload_keys": draw(L, N, J, m, D),
        "payload_values": draw(L, N, J, m, D),
        "temperature": torch.tensor(0.2, dtype=torch.float64),
        "value_gates": 0.2 + 0.6 * draw(L).sigmoid(),
        "layer_bias": 0.5 * draw(L),
        "log_prior": log_prior,
        "query_keys": torch.nn.functional.normalize(draw(n, d), dim=1),
    }
    return {name: leaf(t.to(dtype)) if name in variables else t.to(dtype) for name, t in inputs.items()}


def visibility() -> Tensor:
    visible = torch.ones(T, S, dtype=torch.bool).tril(S - T).repeat(n, 1, 1)
    visible[1, :, :2] = False  # padding on the left of one request
    return visible


def run(function: Attend, inputs: dict[str, Tensor], weighting: Weighting, **settings: Any) -> Tensor:
    """Attention of layer 1: [n, T, H, D]."""
    memory = Memory(
        inputs["retrieval_keys"],
        inputs["payload_keys"],
        inputs["payload_values"],
        inputs["temperature"],
        inputs["value_gates"],
        inputs["layer_bias"],
        weighting,
    )
    terms = memory.terms(inputs["query_keys"], log_prior=inputs["log_prior"], **settings)
    return function(inputs["query"], inputs["key"], inputs["value"], visibility(), D**-0.5, memory, terms, 1)


def gradients(function: Attend, inputs: dict[str, Tensor], weighting: Weighting, **settings: Any) -> dict[str, Tensor]:
    output = run(function, inputs, weighting, **settings)
    direction = torch.randn(output.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    variables = {name: t for name, t in inputs.items() if t.requires_grad}
    found = torch.autograd.grad((output * direction.to(output)).sum(), list(variables.values()))
    return {"output": output.detach(), **dict(zip(variables, found, strict=True))}


def relative_error(found: Tensor, expected: Tensor) -> float:
    assert found.isfinite().all()
    return float((found - expected).norm() / expected.norm())


@pytest.fixture(params=[2**19, 1200, 1], ids=["one tile", "uneven tiles", "an entry a tile"])
def tiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TILE_ELEMENTS", request.param)


@all_settings
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
@pytest.mark.usefixtures("tiles")
def test_tiles_give_the_outputs_and_gradients_of_the_reference(
    weighting: Weighting, settings: dict[str, Any], dtype: torch.dtype, tolerance: float
) -> None:
    expected = gradients(attend, case(dtype), weighting, **settings)
    found = gradients(attend_tiled, case(dtype), weighting, **settings)
    assert found.keys() == expected.keys() == {"output", *VARIABLES}
    errors = {name: relative_error(found[name], expected[name]) for name in expected}
    assert max(errors.values()) <= tolerance, errors


@all_settings
def test_concatenation_gives_the_outputs_and_gradients_of_the_reference(
    weighting: Weighting, settings: dict[str, Any]
) -> None:
    expected = gradients(attend, case(torch.float64), weighting, **settings)
    found = gradients(attend_concatenated, case(torch.float64), weighting, **settings)
    errors = {name: relative_error(found[name], expected[name]) for name in expected}
    assert max(errors.values()) <= 1e-12, errors


@pytest.mark.parametrize("weighting", ["sqrt", "prior"])
@pytest.mark.usefixtures("tiles")
def test_entries_of_selection_weight_zero_are_exact(weighting: Weighting) -> None:
    variables = tuple(name for name in VARIABLES if name != "log_prior")
    expected = gradients(attend, case(torch.float64, variables, zeros=11), weighting)
    found = gradients(attend_tiled, case(torch.float64, variables, zeros=11), weighting)
    for name, gradient in expected.items():
        assert relative_error(found[name], gradient) <= 1e-12, name
    used = found["payload_values"][1].flatten(1).abs().sum(dim=1) > 0
    assert used.tolist() == [False] * 11 + [True] * (N - 11)


@pytest.mark.parametrize("variable", VARIABLES)
def test_a_single_gradient_is_as_good_as_all_of_them(variable: str) -> None:
    expected = gradients(attend, case(torch.float64), "sqrt")[variable]
    found = gradients(attend_tiled, case(torch.float64, (variable,)), "sqrt")
    assert found.keys() == {"output", variable}
    assert relative_error(found[variable], expected) <= 1e-12


def test_nothing_that_grows_with_the_entries_is_kept_for_the_backward_pass() -> None:
    """Only the payloads themselves and [n, N] numbers have an axis of N or N m."""
    kept: list[tuple[int, ...]] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tuple(tensor.shape))
        return tensor

    inputs = case(torch.float32, ("query", "temperature", "value_gates", "log_prior"))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        run(attend_tiled, inputs, "sqrt")
    grown = {shape for shape in kept if N in shape or N * m in shape or N * m + 1 + S in shape}
    assert grown <= {(N, J, m, D), (n, N), (N,), (N, d), (d, N)}, grown


def test_a_request_whose_entries_are_all_left_out_sees_itself_alone() -> None:
    generator = torch.Generator().manual_seed(0)
    query = leaf(torch.randn(2, J, 4, D, generator=generator))
    payload = torch.randn(5, J, m, D, generator=generator)
    log_weight = torch.zeros(2, 5)
    log_weight[1] = -math.inf
    scale = leaf(torch.ones(2, 5))
    output, lse = memory_attention(query, payload, payload, scale, log_weight, scale)
    assert (output[1] == 0).all()
    assert (lse[1] == -math.inf).all()
    found = torch.autograd.grad(output.sum() + lse[0].sum(), [query, scale])
    assert all(gradient.isfinite().all() and (gradient[1] == 0).all() for gradient in found)


def test_a_whole_model_scores_alike_with_either(backbone: Backbone, task_file: Path) -> None:
    """Several layers, images, padding: the gradient reaches the calibration through every later layer.

    In float64, as a float32 model's own gradients are 1e-5 away from the truth in either way of computing attention;
    that transformers' RMS norms round to float32 even then leaves 1e-7.
    """
    precise = Backbone.load(backbone.model.config.name_or_path, dtype=torch.float64)
    examples = read_task(task_file)[:3]
    prompts = [precise.encode_example(example) for example in examples]
    answers = [precise.processor.tokenizer(e.answer, add_special_tokens=False)["input_ids"] for e in examples]
    keys = torch.cat([precise.retrieval_keys(prompt) for prompt in prompts])
    memory = _whole_memory(precise)
    variables = [memory.temperature, memory.value_gates, memory.payload_values]

    def losses() -> list[Tensor]:
        loss = -torch.cat(score(precise, prompts, answers, memory, memory.terms(keys))).sum()
        return [loss.detach(), *torch.autograd.grad(loss, variables)]

    expected = losses()
    with tiled_attention(precise):
        found = losses()
    for one, other in zip(found, expected, strict=True):
        assert relative_error(one, other) <= 1e-7


def test_without_memory_it_is_the_untouched_model(backbone: Backbone, task_file: Path) -> None:
    prompt = backbone.encode_example(read_task(task_file)[0])
    expected = backbone.hidden_states(prompt)
    with tiled_attention(backbone):
        assert torch.equal(backbone.hidden_states(prompt), expected)
    assert torch.equal(backbone.hidden_states(prompt), expected)


def _whole_memory(backbone: Backbone) -> Memory:
    generator = torch.Generator().manual_seed(2)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    layers, heads, size = backbone.num_layers, backbone.num_kv_heads, backbone.head_dim
    return Memory(
        retrieval_keys=torch.nn.functional.normalize(draw(6, backbone.hidden_size), dim=1),
        payload_keys=draw(layers, 6, heads, m, size),
        payload_values=leaf(draw(layers, 6, heads, m, size)),
        temperature=leaf(torch.tensor(0.1, dtype=torch.float64)),
        value_gates=leaf(0.2 + 0.6 * draw(layers).sigmoid()),
        layer_bias=0.5 * draw(layers),
        weighting="sqrt",
    )
