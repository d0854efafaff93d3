"""Memory that is taught to models with sliding windows: served as transformers has it, behind its gate.

Gemma 2 has a soft cap on its logits, too, and gpt-oss sinks.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from transformers import Gemma2Config, Gemma3TextConfig, GptOssConfig

from inducekv_vllm.backbone.turns import message
from inducekv_vllm.bundle import Bundle, write_bundle
from inducekv_vllm.bundle.activation import ACTIVATIONS, Activation
from inducekv_vllm.bundle.source import source_digest_of
from selector.backbone.generation import score
from selector.backbone.model import Backbone
from selector.data.examples import Example
from selector.refined.settings import RefinedSettings
from selector.refined.update import update_refined
from selector.runtime.checkpoint import Checkpoint
from selector.runtime.running import Run
from selector.update.inputs import TaskInputs
from tests.engine.parity import (
    FEWER_PROCESSES,
    TOLERANCE,
    MemoryEngine,
    Prompt,
    World,
    engine,
    greedy,
    prompts,
    served_logprobs,
)
from tests.gates import small_fits
from tests.tiny_families import TEXT_SIZES, save_gemma3, save_gemma4, save_text

WINDOW = 16  # tokens; the questions have two to five times as many
ALTERNATING = ["sliding_attention", "full_attention"] * 2 + ["sliding_attention"]  # vLLM's gpt-oss takes no others
KINDS = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention", "full_attention"]


def question(number: int) -> str:
    return f"Which key opens chest {number}? It stands in the hall, by the door to the garden, under the clock."


def taught(backbone: Backbone, folder: Path, examples: list[Example], activation: Activation) -> Bundle:
    settings = RefinedSettings(
        budget=4,
        payload_tokens=4,
        map_rank=2,
        steps=12,
        activation=activation,
        learning_rate=0.3,
        facts="off",
        precision="float32",
        patience=None,
    )
    checkpoint, _ = Checkpoint.open(folder / activation, {})
    inputs = TaskInputs(examples[:12], examples[12:], (), None)
    with small_fits():
        return update_refined(backbone, inputs, settings, Run(checkpoint)).bundle


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "settings"),
    [
        (Gemma3TextConfig, {"query_pre_attn_scalar": 64}),
        (Gemma2Config, {"query_pre_attn_scalar": 64, "attn_logit_softcapping": 3.0}),
        (GptOssConfig, {"num_local_experts": 2, "num_experts_per_tok": 1, "layer_types": ALTERNATING}),
    ],
)
def test_what_is_taught_is_served(config: type[Any], settings: dict[str, Any], tmp_path: Path) -> None:
    sizes = TEXT_SIZES | {"num_hidden_layers": len(KINDS), "layer_types": KINDS, "sliding_window": WINDOW} | settings
    model = save_text(tmp_path / "model", config=config, **sizes)
    backbone = Backbone.load(model)
    asked_for = [(message("user", question(number)),) for number in range(16)]
    examples = [
        Example(f"k{number}", "keys", messages, (), "red", source_digest_of(messages, []))
        for number, messages in enumerate(asked_for)
    ]
    world = World(model, backbone, {}, {})
    for activation in ACTIVATIONS:
        bundle = taught(backbone, tmp_path, examples, activation)
        assert bundle.gate is not None
        assert {sizes["layer_types"][layer] for layer in bundle.gate.layers} == {"full_attention"}
        world.bundles[activation], world.paths[activation] = bundle, tmp_path / f"{activation}.safetensors"
        write_bundle(bundle, world.paths[activation])
    options = {"enforce_eager": True, "max_num_batched_tokens": 48, "block_size": 16}
    with engine(model, environment=FEWER_PROCESSES, **options) as llm:
        served = MemoryEngine(world, llm)
        asked = [Prompt(None, text) for text in (question(3), question(20), "What is the weather like today?")]
        without, *_ = served.check(asked, [None] * len(asked))
        for name in ACTIVATIONS:
            answer, *_ = served.check(asked, [name] * len(asked))
            assert answer.decision is not None
            assert answer.decision.task == "keys"
            assert answer.output.outputs[0].token_ids != without.output.outputs[0].token_ids


@pytest.mark.slow
@pytest.mark.xfail(strict=True, reason="vLLM 0.32 on CPUs does not let the tokens of a picture see each other")
@pytest.mark.parametrize("save", [save_gemma3, partial(save_gemma4, use_bidirectional_attention="vision")])
def test_pictures_whose_tokens_see_each_other(save: Callable[[Path], Path], tmp_path: Path) -> None:
    """Gemma 3 and 4 without any memory: once vLLM agrees with transformers, the selector need not refuse pictures."""
    backbone = Backbone.load(save(tmp_path / "model"))
    options: dict[str, Any] = {"enforce_eager": True, "block_size": 32, "max_num_batched_tokens": 256}
    with engine(backbone.model.config.name_or_path, environment=FEWER_PROCESSES, **options) as llm:
        for asked in prompts(4, 1):
            (answer,) = llm.chat(asked.messages, greedy())
            tokens, found = served_logprobs(answer.outputs[0])
            text = backbone.chat_text(asked.chat_messages, generation_prompt=True)
            inputs = dict(
                backbone.processor(text=[text], images=asked.images, add_special_tokens=False, return_tensors="pt")
            )
            assert answer.prompt_token_ids == inputs["input_ids"][0].tolist()
            deviation = float((found - score(backbone, [inputs], [tokens])[0]).abs().max())
            print(f"furthest from transformers: {deviation:.3f}")
            assert deviation <= TOLERANCE
