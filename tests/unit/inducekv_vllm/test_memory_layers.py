"""Memory's layers are those with attention: a checkpoint that says otherwise than it is gets a name and a reason."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from inducekv_vllm.backbone.fingerprint import backbone_fingerprint
from inducekv_vllm.backbone.memory_layers import memory_layers
from inducekv_vllm.bundle import BackboneFingerprint
from inducekv_vllm.errors import UnsupportedModel
from selector.backbone.model import Backbone
from tests.tiny_hybrids import LAYERS, WITH_ATTENTION, kinds, save_lfm2


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_lfm2(tmp_path_factory.mktemp("lfm2"))


def text(num_layers: int, **settings: Any) -> Any:
    return SimpleNamespace(num_hidden_layers=num_layers, **settings)


def test_layers_are_counted_among_those_with_attention() -> None:
    assert memory_layers(text(3)) == (0, 1, 2)
    assert memory_layers(text(3, layer_types=["linear_attention", "full_attention", "sliding_attention"])) == (1, 2)
    assert memory_layers(text(3, layers_block_type=["mamba", "attention", "moe"])) == (1,)


@pytest.mark.parametrize(
    ("named", "message"),
    [
        (["full_attention"], "layer_types names the kinds of 1 layers, and the model has 2"),
        (["conv"] * 3, "layer_types names the kinds of 3 layers, and the model has 2"),
        (["full_attention", "retention"], "layer_types has the unknown kind 'retention', of layer 1"),
        (["conv", "linear_attention"], "memory needs layers with attention, found .* conv, linear_attention alone"),
    ],
)
def test_kinds_that_cannot_be(named: list[str], message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        memory_layers(text(2, layer_types=named))


def test_what_is_known_of_a_hybrid(hybrid: Path) -> None:
    backbone = Backbone.load(hybrid)
    assert (backbone.num_layers, backbone.has_states, backbone.full_layers) == (2, True, (0, 1))
    assert [module.layer_idx for module in backbone.attention_layers()] == list(WITH_ATTENTION)


def test_a_hybrid_and_a_dense_model_of_its_shape_are_told_apart(hybrid: Path) -> None:
    of_hybrid = backbone_fingerprint(hybrid)
    assert (of_hybrid.num_layers, of_hybrid.attention_layers) == (2, WITH_ATTENTION)
    dense = BackboneFingerprint.model_validate(of_hybrid.model_dump(exclude={"attention_layers"}))
    assert dense.differences(of_hybrid) == ["attention_layers: None, the model has (3, 7)"]
    assert of_hybrid.differences(dense) == ["attention_layers: (3, 7), the model has None"]
    moved = of_hybrid.model_copy(update={"attention_layers": (2, 7)})
    assert moved.differences(of_hybrid) == ["attention_layers: (2, 7), the model has (3, 7)"]


@pytest.mark.parametrize("numbers", [(3,), (7, 3), (3, 3), (-1, 3)])
def test_numbers_that_cannot_be(hybrid: Path, numbers: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="attention_layers"):
        BackboneFingerprint.model_validate(backbone_fingerprint(hybrid).model_dump() | {"attention_layers": numbers})


@pytest.mark.parametrize(
    ("named", "message"),
    [
        (["full_attention"] * LAYERS, "weights of Lfm2ForCausalLM are missing"),
        (kinds("conv")[1:], "cannot load the configuration: .*layer_types"),
        ([*kinds("conv")[1:], "retention"], "cannot load the configuration: .*layer_types"),
        (["conv"] * LAYERS, "memory needs layers with attention, found layer_types with conv alone"),
    ],
)
def test_a_checkpoint_whose_layer_types_lie(tmp_path: Path, named: list[str], message: str) -> None:
    model = save_lfm2(tmp_path)
    settings = json.loads((model / "config.json").read_text()) | {"layer_types": named}
    (model / "config.json").write_text(json.dumps(settings))
    with pytest.raises(UnsupportedModel, match=message):
        Backbone.load(model)


def test_layers_that_are_not_what_they_are_called(hybrid: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A class of transformers that builds other layers than its configuration names."""
    monkeypatch.setattr("selector.backbone.loading.layer_kinds", lambda text: ["full_attention"] * LAYERS)
    for wrong, message in (((2, 7), "memory needs attention with k_proj"), ((7,), "by layer_types layer 3 has no att")):
        for name in ("memory_layers", "layers_with_attention"):
            monkeypatch.setattr(f"selector.backbone.loading.{name}", lambda *of, wrong=wrong: wrong)
        with pytest.raises(UnsupportedModel, match=message):
            Backbone.load(hybrid)
