"""A user's way with every family: taught by `inducekv-select`, served over HTTP as transformers has it, to 1e-4.

Half an hour for all of them on two cores. Not gpt-oss: its server writes prompts in the token ids of the real
vocabulary.
"""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import openai
import pytest
from transformers import Gemma2Config, Gemma3TextConfig

from benchmarks.server_process import serving
from inducekv_vllm.bundle import read_bundle
from selector.backbone.model import Backbone
from selector.cli.select import main as select
from tests.drawings import drawings
from tests.engine.parity import FEWER_PROCESSES, TOLERANCE, Prompt, World
from tests.gates import small_fits
from tests.server.http import ask, deviation, tokens_and_logprobs, trace_of
from tests.server.launch import ENVIRONMENT, FLAGS
from tests.tiny_families import (
    FAMILIES,
    LATENT_FAMILIES,
    LATENT_PICTURES,
    ON_CPUS,
    PICTURE_FAMILIES,
    ROUTED_WITH_BIAS,
    TEXT_SIZES,
    THROUGH_TRANSFORMERS,
    save_text,
    small_timm,
)
from tests.tiny_hybrids import save_granite_hybrid, save_lfm2, save_qwen3_5

WINDOWED = TEXT_SIZES | {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 16,
}
WITH_WINDOWS: dict[str, Callable[[str | Path], Path]] = {
    "gemma2": partial(save_text, config=Gemma2Config, query_pre_attn_scalar=64, **WINDOWED),
    "gemma3": partial(save_text, config=Gemma3TextConfig, query_pre_attn_scalar=64, **WINDOWED),
}
SMALL_TOWERS = "tests.engine.small_towers.SmallTowersWorker"
HYBRIDS: dict[str, Callable[[str | Path], Path]] = {
    "qwen3.5": save_qwen3_5,
    "granite-hybrid": save_granite_hybrid,
    "lfm2": save_lfm2,
}
WITHOUT_ROPE_OPERATOR = ("--compilation-config", json.dumps(ON_CPUS["compilation_config"]))
OPTIONS = {  # of the server
    "deepseek-vl2": ("--worker-cls", SMALL_TOWERS),
    "qwen3.5": ("--worker-cls", "tests.engine.gdn_float32_worker.GdnFloat32Worker", "--max-model-len", "1024"),
    "granite-hybrid": ("--max-num-batched-tokens", "96"),  # a block of states
    "lfm2": WITHOUT_ROPE_OPERATOR,
}
LONGER = {"lfm2": ("--steps", "80")}  # until the answer is another one: its outputs are larger
OPTIONS |= {
    family: (
        *(*WITHOUT_ROPE_OPERATOR, "--attention-backend", "CPU_MLA"),
        *(("--worker-cls", SMALL_TOWERS) if family in LATENT_PICTURES else ()),
    )
    for family in LATENT_FAMILIES
}
OPTIONS |= dict.fromkeys(ROUTED_WITH_BIAS, ("--worker-cls", "tests.engine.one_group.OneGroupWorker"))
WITH_PICTURES = (*PICTURE_FAMILIES, *LATENT_PICTURES)
EVERY = FAMILIES | WITH_WINDOWS | LATENT_FAMILIES | HYBRIDS
EXAMPLES = 16
SETTINGS = [
    *("--budget", "4", "--payload-tokens", "4", "--activation", "generation", "--facts", "off"),
    *("--steps", "12", "--learning-rate", "0.3", "--precision", "float32", "--allow-worse"),
]


def question(number: int) -> str:
    return f"Which key opens chest {number}? It stands in the hall, by the door to the garden."


def write_examples(folder: Path, family: str) -> Path:
    """A task of one answer; with a picture each, where the family takes any."""
    lines, pictures = [], drawings(EXAMPLES, 1)
    for number, picture in enumerate(pictures):
        parts: list[dict[str, Any]] = [{"type": "text", "text": question(number)}]
        if family in WITH_PICTURES:
            picture.save(folder / f"{number}.png")
            parts.insert(0, {"type": "image_url", "image_url": {"url": f"{number}.png"}})
        messages = [{"role": "user", "content": parts}]
        lines.append({"id": f"k{number}", "task": "keys", "messages": messages, "answer": "red"})
    path = folder / "keys.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("family", EVERY)
def test_taught_and_served(family: str, tmp_path: Path) -> None:
    bundle, task = tmp_path / "keys.safetensors", write_examples(tmp_path, family)
    with small_fits(), small_timm():
        model = EVERY[family](tmp_path / "model")
        settings = [*SETTINGS, *(() if family in LATENT_FAMILIES else ("--map-rank", "2")), *LONGER.get(family, ())]
        assert select(["--model", str(model), "--task", str(task), "--output", str(bundle), *settings]) == 0
        world = World(model, Backbone.load(model), {"keys": read_bundle(bundle)}, {"keys": bundle})
    picture = drawings(EXAMPLES, 1)[3] if family in WITH_PICTURES else None
    prompt = Prompt(picture, question(3))
    flags = ["--served-model-name", "base", f"--memory=keys={bundle}", "--block-size", "32", *FLAGS]
    flags += OPTIONS.get(family, ())
    environment = {**ENVIRONMENT, **({} if family in THROUGH_TRANSFORMERS else FEWER_PROCESSES)}
    with serving([str(model), *flags], tmp_path / "log", environment) as url:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=600)
        base = ask(client, "base", prompt)
        taught = ask(client, "keys", prompt, extra_body={"vllm_xargs": {"inducekv_trace": 1}})
    assert deviation(world, base, prompt, None) <= TOLERANCE
    assert deviation(world, taught, prompt, world.bundles["keys"]) <= TOLERANCE
    assert trace_of(taught)["gate"]["task"] == "keys"
    assert tokens_and_logprobs(taught)[0] != tokens_and_logprobs(base)[0]
