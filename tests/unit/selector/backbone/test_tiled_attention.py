"""Tiled attention against the plain one of `injection`, in outputs and in every gradient."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import selector.backbone.tiled_attention as module
from inducekv_vllm.retrieval.entry_terms import Weighting
from selector.backbone.generation import score
from selector.backbone.injection import TensorMemory, attend, attend_decoupled
from selector.backbone.model import Backbone
from selector.backbone.tiled_attention import attend_decoupled_tiled, attend_tiled, tiled_attention
from selector.data.examples import Example
from selector.paper.calibration import leaf
from tests.unit.selector.backbone.memories import every_setting, random_memory
from tests.unit.selector.exact import in_float64

Attend = Callable[..., Tensor]
n, H, J, T, S, D, d, N, m, L = 3, 4, 2, 5, 7, 16, 12, 40, 3, 2
OF_MEMORY = ("retrieval_keys", "payload_keys", "payload_values", "temperature", "value_gates", "layer_bias")
VARIABLES = ("query", "key", "value", *OF_MEMORY, "log_prior")
all_settings = every_setting(top_k=9)


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
    memory = TensorMemory(**{name: inputs[name] for name in OF_MEMORY}, weighting=weighting)
    terms = memory.terms(inputs["query_keys"], log_prior=inputs["log_prior"], **settings)
    return function(inputs["query"], inputs["key"], inputs["value"], visibility(), D**-0.5, memory, terms, 1)


def gradients(function: Attend, inputs: dict[str, Tensor], weighting: Weighting, **settings: Any) -> dict[str, Tensor]:
    output = run(function, inputs, weighting, **settings)
    direction = torch.randn(output.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    variables = {name: t for name, t in inputs.items() if t.requires_grad}
    found = torch.autograd.grad((output * direction.to(output)).sum(), list(variables.values()))
    return {"output": output.detach(), **dict(zip(variables, found, strict=True))}


def assert_near(found: Mapping[Any, Tensor], expected: Mapping[Any, Tensor], tolerance: float) -> None:
    """Relative to the norm of each tensor."""
    assert found.keys() == expected.keys()
    for name in expected:
        assert found[name].isfinite().all(), name
        assert (found[name] - expected[name]).norm() / expected[name].norm() <= tolerance, name


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
    assert set(expected) == {"output", *VARIABLES}
    assert_near(found, expected, tolerance)


@pytest.mark.parametrize("weighting", ["prior", "uniform"])
@pytest.mark.usefixtures("tiles")
def test_tiles_of_decoupled_memory(weighting: Weighting) -> None:
    def beside(attend: Attend) -> Attend:
        return lambda query, key, value, visible, scaling, memory, *rest: attend(
            query, scaling, replace(memory, form="decoupled"), *rest
        )

    variables = ("query", "payload_keys", "payload_values", "value_gates", "layer_bias")
    variables += ("temperature",) if weighting == "prior" else ()  # else retrieval weights do not count
    expected, found = (
        gradients(beside(attend), case(torch.float64, variables), weighting, top_k=9)
        for attend in (attend_decoupled, attend_decoupled_tiled)
    )
    assert all(gradient.any() for gradient in expected.values())
    assert_near(found, expected, 1e-12)


@pytest.mark.parametrize("weighting", ["sqrt", "prior"])
@pytest.mark.usefixtures("tiles")
def test_entries_of_selection_weight_zero_are_exact(weighting: Weighting) -> None:
    variables = tuple(name for name in VARIABLES if name != "log_prior")
    expected = gradients(attend, case(torch.float64, variables, zeros=11), weighting)
    found = gradients(attend_tiled, case(torch.float64, variables, zeros=11), weighting)
    assert_near(found, expected, 1e-12)
    used = found["payload_values"][1].flatten(1).abs().sum(dim=1) > 0
    assert used.tolist() == [False] * 11 + [True] * (N - 11)


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


def test_a_whole_model_scores_alike_with_either(backbone: Backbone, examples: list[Example]) -> None:
    """Several layers, images, padding: the gradient reaches the calibration through every later layer.

    In float64, as a float32 model's own gradients are 1e-5 away from the truth in either way of computing attention.
    """
    precise = in_float64(Path(backbone.model.config.name_or_path))
    prompts = [precise.encode_example(example) for example in examples[:3]]
    answers = [precise.processor.tokenizer(e.answer, add_special_tokens=False)["input_ids"] for e in examples[:3]]
    keys = torch.cat([precise.retrieval_keys(prompt) for prompt in prompts])
    memory = random_memory(precise, "sqrt", torch.float64)
    leaves = {name: leaf(getattr(memory, name)) for name in ("temperature", "value_gates", "payload_values")}
    memory = replace(memory, **leaves)

    def loss_and_gradients() -> dict[str, Tensor]:
        loss = -torch.cat(score(precise, prompts, answers, memory, memory.terms(keys))).sum()
        by_name = zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True)
        return {"loss": loss.detach(), **dict(by_name)}

    expected = loss_and_gradients()
    with tiled_attention(precise):
        assert_near(loss_and_gradients(), expected, 1e-7)
