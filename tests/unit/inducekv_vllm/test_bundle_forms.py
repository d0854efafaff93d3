"""Decoupled memory, its activations and its maps in a bundle: what is stored, and what is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch

from inducekv_vllm.bundle import Bundle, read_bundle, write_bundle
from inducekv_vllm.errors import BundleError
from tests.bundles import D, G, J, L, random_bundle, random_gated_bundle, random_maps

DECOUPLED: dict[str, Any] = {"form": "decoupled", "weighting": "uniform", "activations": {"t": "text"}}
MAPS = random_maps((L, 5, J, 4, D), 3, G)


def decoupled_bundle(**changes: Any) -> Bundle:
    return random_bundle(**(DECOUPLED | changes))


def test_gates_of_decoupled_memory_are_any_finite_numbers(tmp_path: Path) -> None:
    gates = torch.linspace(-3, 4, L)
    bundle = decoupled_bundle(value_gates=gates, **MAPS)
    write_bundle(bundle, tmp_path / "b.safetensors")
    read = read_bundle(tmp_path / "b.safetensors")
    assert read.metadata == bundle.metadata
    assert torch.equal(read.value_gates, gates)
    assert all(torch.equal(read.tensors()[name], tensor.half()) for name, tensor in MAPS.items())
    with pytest.raises(BundleError, match="value_gates contains NaN or infinite"):
        decoupled_bundle(value_gates=torch.full((L,), float("inf")))
    with pytest.raises(BundleError, match="value_gates must be above 0 and at most 1"):
        random_bundle(value_gates=gates)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"weighting": "sqrt"}, "decoupled memory needs the weighting prior or uniform, found 'sqrt'"),
        ({"activations": {}}, r"decoupled memory needs activations for the tasks \[t\], found \[\]"),
        ({"activations": {"t": "text", "u": "text"}}, r"for the tasks \[t\], found \[t, u\]"),
        ({"activations": {"t": "answer"}}, "activations.t: Input should be 'prompt', 'text' or 'generation'"),
        ({"form": "merged", "weighting": "prior"}, r"merged memory needs activations for the tasks \[\], found \[t\]"),
        ({"form": "mixed"}, "form: Input should be 'merged' or 'decoupled'"),
        (MAPS | {"map_out": None}, "maps need both map_in and map_out, or neither"),
        (
            MAPS | {"map_out": torch.zeros(L, 5, J, G * D, 2)},
            r"map_out must be torch.float16 \[3, 5, 2, 16, 3\], found .*16, 2\]",
        ),
        (MAPS | {"map_in": torch.zeros(L, 5, J, 3)}, "map_in must have 5 dimensions, found 4"),
        (MAPS | {"map_in": torch.zeros(L, 5, J, 3, 12)}, "a map acts on whole heads of 8, found the width 12"),
        (
            MAPS | {"map_in": torch.zeros(L, 5, J, 17, 16)},
            "a map of width 16 has at most that rank, found the rank 17",
        ),
        (MAPS | {"map_in": torch.full((L, 5, J, 3, 16), float("nan"))}, "map_in contains NaN"),
        (MAPS | {"form": "merged", "weighting": "prior", "activations": {}}, "need the decoupled form, found 'merged'"),
    ],
)
def test_what_is_refused(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(BundleError, match=problem):
        decoupled_bundle(**changes)


def test_the_activation_of_a_request() -> None:
    tasks: dict[str, Any] = {"a": "generation", "b": "text"}
    metadata = random_gated_bundle(form="decoupled", activations=tasks).metadata
    assert [metadata.activation_of(task) for task in ("a", "b", None)] == ["generation", "text", "text"]
    assert random_bundle().metadata.activation_of(None) == "prompt"


def test_the_digest_covers_form_activation_and_maps() -> None:
    bundles = [
        random_bundle(weighting="prior"),
        decoupled_bundle(weighting="prior"),
        decoupled_bundle(),
        decoupled_bundle(activations={"t": "generation"}),
        decoupled_bundle(**MAPS),
        decoupled_bundle(**MAPS | {"map_in": -MAPS["map_in"]}),
    ]
    assert len({bundle.digest for bundle in bundles}) == len(bundles)
