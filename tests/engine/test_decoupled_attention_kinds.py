"""Decoupled memory beside attention that merged memory is refused for: windows, soft caps, sinks, an fp8 cache."""

from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import Gemma2Config, GptOssConfig

from inducekv_vllm.bundle import write_bundle
from inducekv_vllm.bundle.activation import ACTIVATIONS
from inducekv_vllm.errors import UnsupportedModel
from tests.bundles import as_decoupled, decided_gate
from tests.engine.parity import (
    FEWER_PROCESSES,
    TOLERANCE,
    MemoryEngine,
    World,
    deviation,
    engine,
    greedy,
    make_world,
    served_logprobs,
    text_prompts,
)
from tests.tiny_families import TEXT_SIZES, save_text

SIZES = TEXT_SIZES | {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2}
SIZES |= {"sliding_window": 12}  # tokens: every prompt has more
KINDS = {
    "soft caps": partial(save_text, config=Gemma2Config, **SIZES, attn_logit_softcapping=3.0, query_pre_attn_scalar=64),
    "sinks": partial(save_text, config=GptOssConfig, **SIZES, num_local_experts=2, num_experts_per_tok=1),
}


def world_of(kind: str, folder: Path) -> World:
    """With a bundle for each activation, without a gate."""
    world = make_world(KINDS[kind](folder / "model"), folder, make_prompts=text_prompts)
    world.bundles.clear()  # their gates look at the first layer, which has a window
    world.paths.clear()
    for activation in ACTIVATIONS:
        world.add(activation, as_decoupled(world.merged["prior"], activation, map_rank=3), folder)
    return world


@pytest.mark.parametrize("kind", KINDS)
def test_parity_and_merged_memory_is_refused(kind: str, tmp_path: Path) -> None:
    """And a gate that looks at a layer with a window, whose blocks are dropped."""
    world = world_of(kind, tmp_path)
    options = {"enforce_eager": True, "max_num_batched_tokens": 40, "block_size": 32}
    with engine(world.model, environment=FEWER_PROCESSES, **options) as llm:
        served, questions = MemoryEngine(world, llm), text_prompts(5, 1)
        without, *others = (served.check(questions, [name] * 5) for name in (None, *ACTIVATIONS))
        assert max(len(answer.output.prompt_token_ids or ()) for answer in without) > 40  # chunks
        for answers in others:
            for both in zip(answers, without, strict=True):
                memory, plain = (served_logprobs(each.output.outputs[0])[1] for each in both)
                assert (memory - plain).abs().max() > 100 * TOLERANCE, "the memory does nothing"
        tasks = ["a", None, "b", None, "a"]
        with served.gated(questions, tasks):
            answers = served.check(questions, ["gated"] * 5)
        assert [answer.decision and answer.decision.task for answer in answers] == tasks
        merged, gate = world.merged["prior"], decided_gate("t", world.backbone.fingerprint, ("t",))
        for bundle, reason in (
            (merged, "merged memory needs full attention in every layer"),
            (
                as_decoupled(merged, "prompt", recipe="refined", gate=gate),
                r"layer 0 cannot be served: its KV cache \(SlidingWindowSpec\)",
            ),
        ):
            write_bundle(bundle, tmp_path / "refused.safetensors")
            with pytest.raises(UnsupportedModel, match=reason):
                served.offline.load_bundle(tmp_path / "refused.safetensors")


@pytest.mark.skipif(
    not (torch.cpu._is_avx512_supported() or torch.cpu._is_amx_tile_supported()),
    reason="vLLM's fp8 KV cache on a CPU needs AVX-512 or AMX",
)
def test_an_fp8_cache_rounds_no_more_than_without_memory(tmp_path: Path) -> None:
    world, questions = world_of("soft caps", tmp_path), text_prompts(3, 1)
    options = {"enforce_eager": True, "kv_cache_dtype": "fp8", "dtype": "bfloat16"}
    with engine(world.model, environment=FEWER_PROCESSES, **options) as llm:
        served = MemoryEngine(world, llm)

        def worst(name: str | None) -> float:
            answers = zip(questions, served.chat(questions, [name] * 3, greedy()), strict=True)
            bundle = name and world.bundles[name]
            return max(deviation(world, prompt, each.output.outputs[0], bundle or None) for prompt, each in answers)

        plain, *others = (worst(name) for name in (None, *ACTIVATIONS))
    assert plain > TOLERANCE
    assert max(others) <= 2 * plain
