"""Decoupled memory beside attention that merged memory is refused for: sliding windows, soft caps, sinks, an fp8 cache.

The reference is transformers with the model's own eager attention, and memory added to its output.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoModelForCausalLM,
    Gemma2Config,
    GptOssConfig,
    PretrainedConfig,
)
from transformers.masking_utils import eager_mask
from vllm.inputs import TokensPrompt

from inducekv_vllm.backbone.fingerprint import backbone_fingerprint
from inducekv_vllm.bundle import Bundle, EntryRecord, write_bundle
from inducekv_vllm.bundle.activation import ACTIVATIONS, Activation, first_active_position
from inducekv_vllm.errors import UnsupportedModel
from inducekv_vllm.frontend.offline import MemoryLLM
from inducekv_vllm.gate import last_averaged
from selector.backbone.injection import TensorMemory, attend_decoupled, mapped
from tests.bundles import decided_gate, random_gate, random_maps, remade
from tests.engine.parity import FEWER_PROCESSES, TOLERANCE, engine, greedy, served_logprobs
from tests.tiny_models import save_tiny_text_model

L, H, J, D, HIDDEN, B, M = 2, 4, 2, 64, 96, 4, 3
WINDOW = 12
SIZES = {
    "hidden_size": HIDDEN,
    "intermediate_size": 2 * HIDDEN,
    "num_hidden_layers": L,
    "num_attention_heads": H,
    "num_key_value_heads": J,
    "head_dim": D,
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention"],
    "max_position_embeddings": 512,
}
PROMPTS = [[(7 * i + 3 * row) % 300 + 8 for i in range(length)] for row, length in enumerate((50, 37, 61))]


def soft_caps(**tokens: Any) -> PretrainedConfig:
    return Gemma2Config(**SIZES, **tokens, attn_logit_softcapping=3.0, query_pre_attn_scalar=D)


def sinks(**tokens: Any) -> PretrainedConfig:
    return GptOssConfig(**SIZES, **tokens, num_local_experts=2, num_experts_per_tok=1)


@dataclass(frozen=True)
class Case:
    """A model folder, and a bundle for each activation."""

    model: Path
    bundles: dict[Activation, Bundle]


def make_case(config: Any, folder: Path) -> Case:
    model = save_tiny_text_model(folder / "model", config)
    generator = torch.Generator().manual_seed(0)
    shape = (L, B, J, M, D)
    bundles = {
        activation: Bundle.create(
            retrieval_keys=torch.nn.functional.normalize(torch.randn(B, HIDDEN, generator=generator), dim=1),
            payload_keys=torch.randn(shape, generator=generator),
            payload_values=torch.randn(shape, generator=generator),
            temperature=0.07,
            value_gates=torch.tensor([1.5, -0.5]),
            layer_bias=torch.tensor([0.5, -0.25]),
            backbone=backbone_fingerprint(model),
            budget=B,
            entries=tuple(EntryRecord(id=f"{i}", task="t", source_digest="ab") for i in range(B)),
            weighting="uniform",
            recipe="refined",
            settings={},
            form="decoupled",
            activations={"t": activation},
            **random_maps(shape, 5, H // J),
        )
        for activation in ACTIVATIONS
    }
    return Case(model, bundles)


@contextmanager
def memory_added(bundle: Bundle | None, start: int) -> Iterator[str]:
    """The name of an attention: the model's own, plus a bundle's memory from position `start` on."""

    def attention(
        module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any
    ) -> tuple[Tensor, None]:
        own, _ = sys.modules[type(module).__module__].eager_attention_forward(
            module, query, key, value, mask, **options
        )
        if bundle is None:
            return own, None
        memory = TensorMemory.from_bundle(bundle)
        terms = memory.terms(torch.zeros(1, HIDDEN))  # uniform: whatever the query is
        added = attend_decoupled(query, options["scaling"], memory, terms, module.layer_idx)
        added = added + mapped(own, memory, terms, module.layer_idx)
        added[:, :start] = 0
        return own + added, None

    AttentionInterface.register("with_memory", attention)
    AttentionMaskInterface.register("with_memory", eager_mask)
    yield "with_memory"


@torch.no_grad()
def expected_logprobs(case: Case, bundle: Bundle | None, prompt: list[int], answer: list[int]) -> Tensor:
    start = 0 if bundle is None else first_active_position(bundle.metadata.activation_of("t"), prompt, ())
    with memory_added(bundle, start) as name:
        model = AutoModelForCausalLM.from_pretrained(case.model, dtype=torch.float32, attn_implementation="eager")
        model.config._attn_implementation = name
        logits = model(input_ids=torch.tensor([[*prompt, *answer]]), use_cache=False).logits[0]
    logprobs = logits[len(prompt) - 1 : -1].log_softmax(dim=-1)
    return logprobs.gather(1, torch.tensor(answer)[:, None])[:, 0]


def deviations(case: Case, offline: MemoryLLM, bundle: Bundle | None, path: Path) -> list[float]:
    memory = None
    if bundle is not None:
        write_bundle(bundle, path)
        memory = offline.load_bundle(path)
    answers = offline.generate([TokensPrompt(prompt_token_ids=p) for p in PROMPTS], greedy(), memory=memory)
    worst = []
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        tokens, served = served_logprobs(answer.output.outputs[0])
        worst.append(float((served - expected_logprobs(case, bundle, prompt, tokens)).abs().max()))
        if bundle is not None:
            assert (served - expected_logprobs(case, None, prompt, tokens)).abs().max() > 100 * TOLERANCE
    return worst


@pytest.mark.parametrize("config", [soft_caps, sinks], ids=lambda config: config.__name__)
def test_parity_and_merged_memory_is_refused(config: Any, tmp_path: Path) -> None:
    case = make_case(config, tmp_path)
    options = {"enforce_eager": True, "max_num_batched_tokens": 40, "block_size": 32}
    with engine(case.model, environment=FEWER_PROCESSES, **options) as llm:
        offline = MemoryLLM(llm)
        for bundle in (None, *case.bundles.values()):
            assert max(deviations(case, offline, bundle, tmp_path / "bundle.safetensors")) <= TOLERANCE
        merged: dict[str, Any] = {"form": "merged", "activations": {}, "weighting": "prior"}
        merged |= {"value_gates": torch.ones(L), "map_in": None, "map_out": None}
        write_bundle(remade(case.bundles["prompt"], **merged), tmp_path / "merged.safetensors")
        with pytest.raises(UnsupportedModel, match="merged memory needs full attention in every layer"):
            offline.load_bundle(tmp_path / "merged.safetensors")
        check_gates(case, offline, tmp_path / "gated.safetensors")


def check_gates(case: Case, offline: MemoryLLM, path: Path) -> None:
    """A gate looks at layers with full attention: a window's blocks are dropped."""
    bundle = case.bundles["prompt"]
    backbone, prompts = bundle.metadata.backbone, [TokensPrompt(prompt_token_ids=p) for p in PROMPTS]
    gated: dict[str, Any] = {"form": "decoupled", "activations": {"t": "prompt"}}
    write_bundle(remade(bundle, **gated, gate=decided_gate("t", backbone, ("t",))), path)
    with pytest.raises(UnsupportedModel, match=r"layer 0 cannot be served: its KV cache \(SlidingWindowSpec\)"):
        offline.load_bundle(path)
    gate = random_gate(backbone, ("t",), layers=(1,))
    write_bundle(remade(bundle, **gated, gate=gate), path)
    answers = offline.generate(prompts, greedy(max_tokens=1), memory=offline.load_bundle(path))
    model = AutoModelForCausalLM.from_pretrained(case.model, dtype=torch.float32, attn_implementation="eager")
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        assert answer.decision is not None
        values: list[Tensor] = []
        hook = model.model.layers[1].self_attn.v_proj.register_forward_hook(lambda *each, v=values: v.append(each[2]))
        with torch.no_grad():
            model(input_ids=torch.tensor([prompt]), use_cache=False)
        hook.remove()
        looked_at = last_averaged(values[0][0][:, None], len(prompt))  # [t, S, F]: all tokens decide
        expected = gate.token_scores.evidence(looked_at)
        assert expected.any()
        margins = gate.rule.decide(expected.numpy()).margins
        np.testing.assert_allclose(answer.decision.margins, margins, rtol=0, atol=10 * TOLERANCE)


@pytest.mark.skipif(
    not (torch.cpu._is_avx512_supported() or torch.cpu._is_amx_tile_supported()),
    reason="vLLM's fp8 KV cache on a CPU needs AVX-512 or AMX",
)
def test_an_fp8_cache_rounds_no_more_than_without_memory(tmp_path: Path) -> None:
    case = make_case(soft_caps, tmp_path)
    options = {"enforce_eager": True, "kv_cache_dtype": "fp8", "dtype": "bfloat16"}
    with engine(case.model, environment=FEWER_PROCESSES, **options) as llm:
        offline = MemoryLLM(llm)
        plain, *others = (
            max(deviations(case, offline, bundle, tmp_path / "bundle.safetensors"))
            for bundle in (None, *case.bundles.values())
        )
    assert plain > TOLERANCE
    assert max(others) <= 2 * plain
