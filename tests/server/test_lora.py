"""A bundle made with a LoRA adapter: both passes run with it, and answers equal a model with the adapter merged in."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import openai
import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.server_process import serving
from inducekv_vllm.bundle import Bundle, write_bundle
from tests.inducekv_vllm.parity import TOLERANCE, World, gated_bundle, make_world, prompts
from tests.server.conftest import ENVIRONMENT, FLAGS
from tests.server.http import TRACED, ask, deviation, trace_of
from tests.server.test_bundles import Bundles
from tests.tiny_models import save_tiny_llava

RANK, SCALE = 4, 2.0


@dataclass(frozen=True)
class Adapted:
    url: str
    plain: World  # the model as it is
    merged: World  # the model with the adapter merged into its weights
    bundle: Bundle  # of the merged model, and naming the adapter


def save_adapter(model: Path, adapter: Path, merged: Path) -> None:
    """A random adapter of the text model's q_proj and v_proj, and the model that has it merged in."""
    generator = torch.Generator().manual_seed(0)
    weights = load_file(model / "model.safetensors")
    factors: dict[str, torch.Tensor] = {}
    for name in [
        n for n in weights if n.startswith("language_model.") and n.endswith(("q_proj.weight", "v_proj.weight"))
    ]:
        rows, columns = weights[name].shape
        a = 0.2 * torch.randn(RANK, columns, generator=generator)  # [r, in]
        b = 0.2 * torch.randn(rows, RANK, generator=generator)  # [out, r]
        weights[name] = weights[name].float() + SCALE * b @ a
        prefix = "base_model.model." + name.removesuffix(".weight")
        factors |= {f"{prefix}.lora_A.weight": a, f"{prefix}.lora_B.weight": b}
    assert factors
    shutil.copytree(model, merged)
    save_file(weights, merged / "model.safetensors", metadata={"format": "pt"})
    adapter.mkdir()
    save_file(factors, adapter / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": SCALE * RANK, "target_modules": ["q_proj", "v_proj"]}
    (adapter / "adapter_config.json").write_text(json.dumps(config | {"task_type": "CAUSAL_LM", "bias": "none"}))


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Adapted]:
    folder = tmp_path_factory.mktemp("lora")
    model = save_tiny_llava(folder / "model")
    save_adapter(model, folder / "adapter", folder / "merged")
    for name in ("plain", "with"):
        (folder / name).mkdir()
    plain, merged = make_world(model, folder / "plain"), make_world(folder / "merged", folder / "with")
    made = merged.bundles["prior"]
    facts = {name: getattr(made.metadata, name) for name in ("backbone", "budget", "entries", "weighting", "recipe")}
    bundle = Bundle.create(**made.tensors(), **facts, settings={}, adapter="style")
    write_bundle(bundle, folder / "style.safetensors")
    lora = ["--enable-lora", "--max-lora-rank", "8", "--lora-modules", f"style={folder / 'adapter'}"]
    arguments = [str(model), f"--memory=m={folder / 'style.safetensors'}", *FLAGS, *lora, "--served-model-name", "base"]
    with serving(arguments, folder / "log", ENVIRONMENT) as url:
        yield Adapted(url, plain, merged, bundle)


def test_answers_equal_the_merged_model_with_the_memory(adapted: Adapted) -> None:
    with openai.OpenAI(base_url=f"{adapted.url}/v1", api_key="none", max_retries=0) as client:
        for prompt in prompts(3, seed=41):
            for name, world, bundle in (
                ("base", adapted.plain, None),
                ("style", adapted.merged, None),
                ("m", adapted.merged, adapted.bundle),
            ):
                assert deviation(world, ask(client, name, prompt), prompt, bundle) <= TOLERANCE
        assert trace_of(ask(client, "m", prompt, extra_body=TRACED))["digest"] == adapted.bundle.digest
        assert {m.id for m in client.models.list()} == {"base", "style", "m"}


def test_behind_a_closed_gate_is_the_model_with_the_adapter(adapted: Adapted, tmp_path: Path) -> None:
    """What the memory was made for: "closed" takes the memory away, not the adapter it belongs to."""
    asked = prompts(2, seed=42)
    bundle = gated_bundle(adapted.merged, asked, [None, "a"], adapter="style")
    write_bundle(bundle, tmp_path / "gated.safetensors")
    assert Bundles(adapted.url).load("gated", tmp_path / "gated.safetensors").status_code == 200
    with openai.OpenAI(base_url=f"{adapted.url}/v1", api_key="none", max_retries=0) as client:
        for prompt, is_open in zip(asked, (False, True), strict=True):
            response = ask(client, "gated", prompt, extra_body=TRACED)
            assert trace_of(response)["gate"]["open"] == is_open
            assert deviation(adapted.merged, response, prompt, bundle if is_open else None) <= TOLERANCE
            assert deviation(adapted.plain, response, prompt, None) > 100 * TOLERANCE


def test_a_bundle_that_names_no_adapter_is_refused(adapted: Adapted) -> None:
    refused = Bundles(adapted.url).load("n", adapted.plain.paths["sqrt"])
    assert refused.status_code == 400
    assert "names no adapter" in refused.json()["error"]["message"]
