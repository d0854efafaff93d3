"""Drafts are made without memory and checked with it: the answers are those without drafts."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Glm4MoeConfig, LlamaConfig
from vllm.sampling_params import StructuredOutputsParams

from server.demo import CHECKPOINT
from tests.engine.parity import (
    FEWER_PROCESSES,
    WORKER_VARIABLE,
    MemoryEngine,
    Prompt,
    World,
    engine,
    greedy,
    make_world,
    prompts,
    text_prompts,
)
from tests.tiny_families import FAMILIES, GLM_EXPERTS, TEXT_SIZES
from tests.tiny_models import HEAD_DIM, HIDDEN, save_tiny_text_model

HEAD_SIZES = ("num_attention_heads", "num_key_value_heads", "intermediate_size")


@contextmanager
def drafting(world: World, **speculative: Any) -> Iterator[MemoryEngine]:
    options = {"enforce_eager": True, "block_size": 32, "disable_log_stats": False, "max_num_batched_tokens": 96}
    options["speculative_config"] = {"num_speculative_tokens": 3, **speculative}
    with engine(world.model, environment=FEWER_PROCESSES, **options) as llm:
        yield MemoryEngine(world, llm)


def check(served: MemoryEngine, make_prompts: Callable[[int, int], list[Prompt]]) -> None:
    """Every form and activation, open and closed; the second time, requests are decided at once."""
    questions, tasks = make_prompts(6, 18), ["a", None, "b", "b", "a", None]
    for activations in ({"a": "generation", "b": "prompt"}, {"a": "text", "b": "generation"}):
        with served.gated(questions, tasks, form="decoupled", weighting="uniform", activations=activations):
            for _ in range(2):
                answers = served.check(questions, ["gated"] * 6, greedy(max_tokens=24))
                assert [answer.decision and answer.decision.task for answer in answers] == tasks
    served.check(questions, ["sqrt", "first", None, "prior", "second", None], greedy(max_tokens=24))


def drafts(served: MemoryEngine) -> tuple[float, float]:
    """How many tokens were drafted, and accepted."""
    counts: dict[str, Any] = {metric.name: metric for metric in served.offline.llm.get_metrics()}
    drafted, accepted = (counts[f"vllm:spec_decode_num_{name}_tokens"].value for name in ("draft", "accepted"))
    return drafted, accepted


def test_ngrams(tmp_path: Path) -> None:
    world = make_world(CHECKPOINT, tmp_path, with_merged=True)
    with drafting(world, method="ngram", prompt_lookup_max=3, prompt_lookup_min=1) as served:
        check(served, prompts)
        drafted, accepted = drafts(served)
        assert 0 < accepted < drafted
        params = greedy(
            structured_outputs=StructuredOutputsParams(choice=["red circle", "blue square"]), ignore_eos=False
        )
        questions = prompts(4, seed=3)
        with served.gated(questions, ["a", None, "b", "a"]):
            answers = served.chat(questions, ["gated"] * 4, params)
        assert {answer.output.outputs[0].text for answer in answers} <= {"red circle", "blue square"}


needs_triton = pytest.mark.skipif(
    WORKER_VARIABLE not in os.environ, reason="vLLM's draft models need Triton: test_gpu_attention.py"
)


@needs_triton
def test_a_draft_model(tmp_path: Path) -> None:
    """Its layers are not touched: their numbers and those of the served model overlap."""
    draft = save_tiny_text_model(tmp_path / "draft", lambda **sizes: LlamaConfig(**TEXT_SIZES, **sizes), seed=5)
    world = make_world(FAMILIES["llama"](tmp_path / "model"), tmp_path, make_prompts=text_prompts, with_merged=True)
    with drafting(world, method="draft_model", model=str(draft)) as served:
        check(served, text_prompts)
        drafted, accepted = drafts(served)
        assert 0 <= accepted < drafted


def save_eagle_head(folder: Path, method: str, vocabulary: int) -> Path:
    """A random head for the tiny Llama in the layout of published ones: a layer of a Llama, and `fc` before it."""
    heads, kv_heads, inner = (TEXT_SIZES[name] for name in HEAD_SIZES)
    wide = 2 * HIDDEN if method == "eagle3" else HIDDEN  # EAGLE-3 shows its layer the token beside the state
    layer = {
        "self_attn.q_proj": (heads * HEAD_DIM, wide),
        "self_attn.k_proj": (kv_heads * HEAD_DIM, wide),
        "self_attn.v_proj": (kv_heads * HEAD_DIM, wide),
        "self_attn.o_proj": (HIDDEN, heads * HEAD_DIM),
        "mlp.gate_proj": (inner, HIDDEN),
        "mlp.up_proj": (inner, HIDDEN),
        "mlp.down_proj": (HIDDEN, inner),
        "post_attention_layernorm": (HIDDEN,),
    }
    if method == "eagle3":
        layer |= {"input_layernorm": (HIDDEN,), "hidden_norm": (HIDDEN,)}
        shapes = {f"midlayer.{name}": shape for name, shape in layer.items()}
        shapes |= {"fc": (HIDDEN, 3 * HIDDEN), "norm": (HIDDEN,), "lm_head": (vocabulary, HIDDEN)}
        architecture = "LlamaForCausalLMEagle3"
    else:
        shapes = {f"layers.0.{name}": shape for name, shape in layer.items()} | {"fc": (HIDDEN, 2 * HIDDEN)}
        architecture = "LlamaForCausalLM"
    config = LlamaConfig(**TEXT_SIZES | {"num_hidden_layers": 1}, vocab_size=vocabulary, architectures=[architecture])
    config.save_pretrained(folder)
    generator = torch.Generator().manual_seed(7)
    tensors = {
        f"{name}.weight": torch.randn(shape, generator=generator) / shape[-1] ** 0.5
        if len(shape) > 1
        else torch.ones(shape)
        for name, shape in shapes.items()
    }
    save_file(tensors, folder / "model.safetensors")
    return folder


@needs_triton
@pytest.mark.parametrize("method", ["eagle", "eagle3"])
def test_an_eagle_head(method: str, tmp_path: Path) -> None:
    """It drafts from the hidden states of the pass with memory; its layer stands behind the model's, untouched."""
    world = make_world(FAMILIES["llama"](tmp_path / "model"), tmp_path, make_prompts=text_prompts, with_merged=True)
    vocabulary = LlamaConfig.from_pretrained(tmp_path / "model").vocab_size
    head = save_eagle_head(tmp_path / "head", method, vocabulary)
    with drafting(world, method=method, model=str(head)) as served:
        check(served, text_prompts)
        drafted, accepted = drafts(served)
        assert 0 <= accepted < drafted


def save_with_mtp(folder: Path) -> Path:
    """A tiny GLM-4.5 with a layer for multi-token prediction behind its own, named as published ones are.

    It draws the model's last token again: its block adds nothing, and the state of the pass goes to the head as it is.
    """
    sizes = TEXT_SIZES | GLM_EXPERTS | {"num_mtp_layers": 1}
    save_tiny_text_model(folder, lambda **numbers: Glm4MoeConfig(**sizes, **numbers))
    weights, L = load_file(folder / "model.safetensors"), TEXT_SIZES["num_hidden_layers"]
    ours, last = f"model.layers.{L}.", f"model.layers.{L - 1}."
    for name in [name for name in weights if name.startswith(last)]:
        ends = name.endswith(("o_proj.weight", "down_proj.weight"))
        weights[ours + name.removeprefix(last)] = weights[name] * (0 if ends else 1)
    weights[f"{ours}eh_proj.weight"] = torch.cat([torch.zeros(HIDDEN, HIDDEN), torch.eye(HIDDEN)], dim=1)
    weights |= {f"{ours}{name}.weight": torch.ones(HIDDEN) for name in ("enorm", "hnorm", "shared_head.norm")}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@needs_triton
def test_multi_token_prediction(tmp_path: Path) -> None:
    """Its layer has the number behind the model's last one, and no memory; the selector leaves it out."""
    world = make_world(save_with_mtp(tmp_path / "model"), tmp_path, make_prompts=text_prompts, with_merged=True)
    with drafting(world, method="mtp") as served:
        check(served, text_prompts)
        drafted, accepted = drafts(served)
        print(f"{accepted} of {drafted} drafted tokens accepted")
        assert 0 < accepted < drafted
