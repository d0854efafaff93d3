"""Quantised checkpoints in real engines: no further from transformers than the floats that their weights stand for.

vLLM computes with quantised weights in 16 bits alone, where 1e-4 cannot be asked of anybody. So the same function is
served from a plain checkpoint, too, and what both are off is compared.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from inducekv_vllm.vllm_seams import known_bugs
from tests.engine.parity import (
    FEWER_PROCESSES,
    MemoryEngine,
    World,
    deviation,
    engine,
    greedy,
    make_world,
    silent_below,
    text_prompts,
)
from tests.quantized import save_quantized
from tests.tiny_families import FAMILIES

OPTIONS: dict[str, Any] = {"enforce_eager": True, "block_size": 32}
needs_4_bit_kernel = pytest.mark.skipif(
    not known_bugs.has_4_bit_kernel(), reason="vLLM has no kernel for 4-bit weights on this CPU"
)
NAMES = (None, "sqrt", "first", "gated")


def quantised_and_plain(folder: Path, method: str) -> tuple[Path, Path]:
    """Two checkpoints of one function."""
    quantised = FAMILIES["llama"](folder / "quantised")
    plain = Path(shutil.copytree(quantised, folder / "plain"))
    floats = save_quantized(quantised, method)
    save_file({name: tensor.float() for name, tensor in floats.items()}, plain / "model.safetensors", {"format": "pt"})
    assert "quantization_config" not in json.loads((plain / "config.json").read_text())
    return quantised, plain


def bundles(model: Path) -> World:
    folder = model.with_name(f"bundles of {model.name}")
    folder.mkdir()
    return make_world(model, folder, make_prompts=text_prompts, with_merged=True)


def deviations(model: Path, dtype: str) -> torch.Tensor:
    """The largest of each answer, without memory and with it."""
    world, gated = bundles(model), text_prompts(2, 18)
    questions = [*text_prompts(2, 5), *gated]
    with engine(world.model, environment=FEWER_PROCESSES, dtype=dtype, **OPTIONS) as llm:
        served = MemoryEngine(world, llm)
        with served.gated(gated, ["a", None], **silent_below(world, 0, 0)):
            found = []
            for name in NAMES:
                answers = served.chat(questions, [name] * len(questions), greedy())
                for prompt, answer in zip(questions, answers, strict=True):
                    (completion,) = answer.output.outputs
                    found.append(deviation(world, prompt, completion, name and served.bundles[name]))
                if name == "gated":
                    tasks = [answer.decision and answer.decision.task for answer in answers]
                    assert tasks[-2:] == ["a", None]
    return torch.tensor(found)


@needs_4_bit_kernel
@pytest.mark.parametrize(
    ("method", "dtype"),
    [
        ("gptq", "float16"),
        pytest.param("awq", "float16", marks=pytest.mark.slow),
        pytest.param("awq", "bfloat16", marks=pytest.mark.slow),
        pytest.param("pack-quantized", "float16", marks=pytest.mark.slow),
    ],
)
def test_weights_alone(method: str, dtype: str, tmp_path: Path) -> None:
    """The gate decides alike, too."""
    quantised, plain = quantised_and_plain(tmp_path, method)
    ours, theirs = (deviations(folder, dtype) for folder in (quantised, plain))
    print(f"{method} in {dtype}: {ours.max():.4f}, plain {theirs.max():.4f}")
    assert ours.max() <= 2 * theirs.max()


@pytest.mark.slow
def test_activations_too(tmp_path: Path) -> None:
    """Integers of 8 bits for both: what is rounded for each token is not in the floats, with memory or without."""
    quantised, plain = quantised_and_plain(tmp_path, "int-quantized")
    ours, theirs = (deviations(folder, "float32") for folder in (quantised, plain))
    print(f"int-quantized in float32: {ours.max():.4f}, plain {theirs.max():.6f}")
    without, with_memory = ours[:4].max(), ours[4:].max()
    assert theirs.max() <= 1e-4
    assert with_memory <= 3 * without


def test_4_bit_weights_are_refused_at_start_on_a_cpu_without_their_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quantised, _ = quantised_and_plain(tmp_path, "gptq")
    monkeypatch.setattr(known_bugs, "has_4_bit_kernel", lambda: False)
    with (
        pytest.raises(Exception, match="4-bit weights, and vLLM has no kernel for them on this CPU"),
        engine(quantised, environment=FEWER_PROCESSES, dtype="float16", **OPTIONS),
    ):
        pass
