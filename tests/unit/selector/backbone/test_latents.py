"""Memory of latents (MLA) in transformers: what it is made of, its gradients, tails, and what is refused."""

import json
import math
import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DeepseekV2Config

from inducekv_vllm.backbone.turns import turn_marks
from inducekv_vllm.errors import ConfigError, UnsupportedModel
from selector.backbone import injection, token_values
from selector.backbone.extraction import extract
from selector.backbone.generation import answer_logprobs
from selector.backbone.injection import TensorMemory, Terms, attend_latents
from selector.backbone.model import Backbone
from selector.backbone.tails import compute_tail, has_tails, tail_logprobs
from selector.backbone.tiled_attention import tiled_attention
from selector.data.examples import Example
from selector.refined.entries import settings_for
from selector.refined.settings import RefinedSettings
from tests.tiny_families import LATENT_SIZES, save_deepseek_v3, save_text

V, Z = 48, 16  # of a latent, and of the part of a key that is rotated
# Without experts, which torch has in float32 at most.
SIZES = {
    "first_k_dense_replace": 3,
    "kv_lora_rank": V,
    "qk_rope_head_dim": Z,
    "qk_nope_head_dim": 24,
    "v_head_dim": 40,
    "num_hidden_layers": 3,
}
WORDS = ("red", "green", "blue", "circle", "square", "star", "ring", "triangle")


@pytest.fixture(scope="module", params=["v2", "v3"])
def backbone(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Backbone:
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "v3":
        return Backbone.load(save_deepseek_v3(folder, **SIZES))
    settings: dict[str, Any] = {**LATENT_SIZES, **SIZES, "q_lora_rank": None}
    return Backbone.load(save_text(folder, DeepseekV2Config, **settings, topk_method="greedy"))


def message(words: int, seed: int = 0) -> list[dict[str, Any]]:
    text = " ".join(WORDS[(seed + each * each) % len(WORDS)] for each in range(words))
    return [{"role": "user", "content": [{"type": "text", "text": text}]}]


def random_memory(backbone: Backbone, dtype: torch.dtype = torch.float32) -> TensorMemory:
    generator = torch.Generator().manual_seed(0)
    L, m = backbone.num_layers, 3
    return TensorMemory(
        retrieval_keys=torch.zeros(1, backbone.hidden_size, dtype=dtype),
        payload_keys=torch.randn(L, 1, 1, m, V + Z, generator=generator, dtype=dtype).requires_grad_(),
        payload_values=torch.randn(L, 1, 1, m, V, generator=generator, dtype=dtype).requires_grad_(),
        temperature=torch.tensor(1.0, dtype=dtype),
        value_gates=torch.ones(L, dtype=dtype),
        layer_bias=torch.zeros(L, dtype=dtype),
        weighting="uniform",
        form="decoupled",
    )


def always(count: int, first_active: Tensor | None = None) -> Terms:
    one = torch.ones(count, 1)
    return Terms(one, torch.zeros(count, 1), one, torch.full((count,), -math.inf), first_active)


def test_entries_are_latents_as_the_cache_has_them(backbone: Backbone, monkeypatch: pytest.MonkeyPatch) -> None:
    """A token at position 0 is not rotated: as memory it has the logits and the values that attention gives it."""
    assert (backbone.num_kv_heads, backbone.head_dim, backbone.value_dim) == (1, V + Z, V)
    fingerprint = backbone.fingerprint
    assert (fingerprint.num_kv_heads, fingerprint.head_dim, fingerprint.value_dim) == (1, V + Z, V)
    one: Any = {"input_ids": torch.tensor([[17]]), "attention_mask": torch.ones(1, 1, dtype=torch.int64)}
    example = Example("x", "t", tuple(message(1)), (), "a", "digest")
    monkeypatch.setattr(Backbone, "encode_example", lambda self, example: one)
    entries = extract(backbone, [example], payload_tokens=1)
    assert entries.payload_keys.shape == (backbone.num_layers, 1, 1, 1, V + Z)
    assert torch.equal(entries.payload_values, entries.payload_keys[..., :V])

    seen: list[tuple[Any, Tensor, Tensor, Tensor]] = []
    own = injection.own_attention

    def spy(module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        seen.append((module, query, key, value))
        return own(module, query, key, value, *args, **kwargs)

    monkeypatch.setattr(injection, "own_attention", spy)
    backbone.hidden_states(one)
    for layer, (module, query, key, value) in enumerate(seen):
        stored = entries.payload_keys[layer, 0, 0], entries.payload_values[layer, 0, 0]  # [1, V + Z] and [1, V]

        def read(absorbed: Tensor, *args: Any, of_layer: Any = (query, key, stored)) -> Tensor:
            query, key, stored = of_layer
            torch.testing.assert_close(absorbed @ stored[0].T, query @ key.transpose(2, 3), rtol=1e-4, atol=1e-4)
            return stored[1].expand(1, 1, query.shape[1], V)

        memory: Any = None
        found = attend_latents(module, read, query, 1.0, memory, memory, layer)
        torch.testing.assert_close(found, value.transpose(1, 2), rtol=1e-4, atol=1e-4)
    assert len(seen) == backbone.num_layers


@pytest.mark.parametrize("in_tiles", [False, True])
def test_gradients_against_finite_differences(backbone: Backbone, in_tiles: bool) -> None:
    double = Backbone.load(backbone.model.config.name_or_path, torch.float64)
    memory, prompts = random_memory(double, torch.float64), [double.encode(message(4, seed), []) for seed in range(2)]
    answers = [[5, 6], [7]]
    names = ("payload_keys", "payload_values")

    def loss(**changes: Tensor) -> Tensor:
        tensors = {**vars(memory), **changes}
        found = answer_logprobs(double, prompts, answers, TensorMemory(**tensors), always(2))
        return -sum((each.gather(1, torch.tensor(a)[:, None]).sum() for each, a in zip(found, answers, strict=True)))

    whole = loss()
    slopes = torch.autograd.grad(whole, [getattr(memory, name) for name in names])
    with torch.no_grad():
        for name, slope in zip(names, slopes, strict=True):
            assert slope.abs().max() > 0
            # transformers norms in float32, so steps are not small.
            step = 1e-2 * slope / slope.norm()
            tensor = getattr(memory, name)
            ends = []
            for direction in (step, -step):
                with tiled_attention(double) if in_tiles else nullcontext():
                    ends.append(float(loss(**{name: tensor + direction})))
            assert (ends[0] - ends[1]) / 2e-2 == pytest.approx(float(slope.norm()), rel=2e-3)
    if in_tiles:
        with tiled_attention(double):
            again = torch.autograd.grad(loss(), [getattr(memory, name) for name in names])
        for mine, expected in zip(again, slopes, strict=True):
            torch.testing.assert_close(mine, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("where", ["prompt", "middle", "generation"])
def test_tails(backbone: Backbone, where: str) -> None:
    """DeepSeek-V2's rotation is one complex tensor, so its prompts are computed whole."""
    memory, prompts = random_memory(backbone), [backbone.encode(message(words), []) for words in (3, 6)]
    answers, lengths = [[5, 6], [7]], [prompt["input_ids"].shape[1] for prompt in prompts]
    first = [{"prompt": 0, "middle": T // 2, "generation": T - 1}[where] for T in lengths]
    is_v3 = "V3" in type(backbone.model).__name__
    assert [has_tails(backbone, *each) for each in zip(prompts, answers, first, strict=True)] == [is_v3] * 2
    if not is_v3:
        return
    whole = answer_logprobs(backbone, prompts, answers, memory, always(2, torch.tensor(first)))
    plain = answer_logprobs(backbone, prompts, answers)
    tails = [compute_tail(backbone, *each) for each in zip(prompts, answers, first, strict=True)]
    in_tails = tail_logprobs(backbone, tails, [len(answer) for answer in answers], memory, always(2))
    payloads = [memory.payload_keys, memory.payload_values]
    for mine, expected, without in zip(in_tails, whole, plain, strict=True):
        torch.testing.assert_close(mine, expected, rtol=0, atol=1e-4)
        assert (expected - without).abs().max() > 0.01
    slopes = [torch.autograd.grad(sum(each.sum() for each in found), payloads) for found in (in_tails, whole)]
    for mine, expected in zip(*slopes, strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-3, atol=1e-5 * float(expected.abs().max()))


def test_a_gate_sees_latents(backbone: Backbone, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if what prompts begin with is computed once."""
    encoded, marks = [backbone.encode(message(3, seed), []) for seed in range(3)], turn_marks(backbone.processor)
    (values, *_) = token_values.token_values(backbone, encoded, (0, 1), marks)
    assert values.shape[1:] == (2, V)
    found = []
    for worth_it in (2, 10**6):
        monkeypatch.setattr(token_values, "WORTH_IT", worth_it)
        found.append(token_values.asked_texts(backbone, encoded, (0, 2), marks, {5}).means)
    for mine, expected in zip(*found, strict=True):
        assert mine is not None
        assert expected is not None
        torch.testing.assert_close(mine, expected, rtol=0, atol=1e-4)


def test_what_has_no_form_in_latents_is_refused(backbone: Backbone) -> None:
    assert settings_for(backbone, RefinedSettings()).map_rank == 0
    with pytest.raises(ConfigError, match=r"latent attention \(MLA\) takes no maps .* expected map_rank 0, found 8"):
        settings_for(backbone, RefinedSettings(map_rank=8))
    with pytest.raises(UnsupportedModel, match=r"merged memory needs full attention .* latent attention \(MLA\)"):
        backbone.require_full_attention()


def test_layers_that_the_configuration_leaves_out_are_refused(backbone: Backbone, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(backbone.model.config.name_or_path, tmp_path / "model"))
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_hidden_layers": 2, "mlp_layer_types": None}))
    with pytest.raises(UnsupportedModel, match=r"there is no layer 2, found .*\.kv_b_proj\.weight"):
        Backbone.load(folder)
