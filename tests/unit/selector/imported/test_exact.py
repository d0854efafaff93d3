"""An imported memory gives the log-probabilities of its source, whatever RoPE the model has; else it is refused."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from inducekv_vllm.bundle import Bundle
from inducekv_vllm.errors import BundleError, UnsupportedModel
from selector.backbone.generation import score
from selector.backbone.injection import TensorMemory
from selector.backbone.model import Backbone
from selector.imported.bundle import import_source
from selector.imported.cartridge import cartridge_source
from selector.imported.peft import peft_source
from selector.imported.prefix import require_distances
from selector.imported.text import text_source
from selector.recipes import RECIPES
from selector.update.inputs import check_continued
from tests.imported import ADAPTERS, behind_adapter, behind_cache, behind_text, save_adapter, save_cartridge
from tests.tiny_families import FAMILIES, LATENT_FAMILIES
from tests.tiny_hybrids import save_lfm2

from .conftest import small_llama

TOLERANCE, MATTERS = 2e-5, 0.1
QUESTION, ANSWER = "Is the red triangle left of the blue one?", [5, 60, 7, 300, 12, 100, 33]
TEXT = "The picture shows two green stars and a yellow ring. Answer in a sentence."


def rope(**parameters: Any) -> Callable[[Path], Path]:
    return partial(small_llama, max_position_embeddings=512, rope_parameters={"rope_theta": 10000.0, **parameters})


LONGER = {"factor": 4.0, "original_max_position_embeddings": 128}
MODELS: dict[str, Callable[[Path], Path]] = {
    "yarn": rope(rope_type="yarn", **LONGER),  # which scales, too
    "llama3": rope(rope_type="llama3", low_freq_factor=1.0, high_freq_factor=4.0, **LONGER),
    "linear": rope(rope_type="linear", factor=2.0),
    **{
        name: FAMILIES[name] for name in ("phi", "cohere", "smollm3", "olmo2")
    },  # partial, interleaved, not in all layers
}
# Their attention is to distances alone in a softmax of its own; the others are to be refused.
EXACT = [name for name in FAMILIES if not name.startswith(("hunyuan", "ministral", "gemma4", "laguna", "llama4"))]
EXACT = [name for name in EXACT if name not in ("afmoe", "exaone4", "mellum", "olmo3", "gemma3")]


def inputs_of(backbone: Backbone) -> dict[str, Tensor]:
    ids = torch.tensor([backbone.tokenizer(QUESTION)["input_ids"]])
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def check(backbone: Backbone, bundle: Bundle, expected: Tensor) -> None:
    """With the reference of the injection, which the server is compared with elsewhere."""
    memory, inputs = TensorMemory.from_bundle(bundle), inputs_of(backbone)
    terms = memory.terms(torch.zeros(1, backbone.hidden_size))
    found = score(backbone, [inputs], [ANSWER], memory, terms)[0]
    assert (found - expected).abs().max() < TOLERANCE
    assert (score(backbone, [inputs], [ANSWER])[0] - expected).abs().max() > MATTERS


def check_all(model: Path, folder: Path) -> None:
    """A text and what lies in a cache."""
    backbone = Backbone.load(model)
    (folder / "text.txt").write_text(TEXT)
    bundle = import_source(backbone, text_source(folder / "text.txt", None), task="t", dtype="float32")
    ids = backbone.tokenizer(TEXT)["input_ids"]
    check(backbone, bundle, behind_text(model, ids, inputs_of(backbone), ANSWER))
    sizes = backbone.num_layers, backbone.num_kv_heads, backbone.head_dim
    keys, values = save_cartridge(folder / "c.pt", *sizes)
    bundle = import_source(backbone, cartridge_source(folder / "c.pt"), task="t", dtype="float32")
    check(backbone, bundle, behind_cache(model, keys, values, inputs_of(backbone), ANSWER))


@pytest.mark.parametrize("name", MODELS)
def test_a_text_and_a_cartridge(name: str, tmp_path: Path) -> None:
    check_all(MODELS[name](tmp_path / "model"), tmp_path)


@pytest.mark.parametrize("name", ADAPTERS)
def test_an_adapter_of_peft(name: str, llama_folder: Path, llama: Backbone, tmp_path: Path) -> None:
    folder = save_adapter(llama_folder, name, tmp_path / "adapter")
    bundle = import_source(llama, peft_source(folder), task="t")
    assert (bundle.metadata.form, bundle.metadata.weighting, bundle.num_entries) == ("merged", "uniform", 1)
    assert bundle.metadata.payload_dtype == "float32"  # as the checkpoint
    check(llama, bundle, behind_adapter(llama_folder, folder, inputs_of(llama), ANSWER))
    with pytest.raises(BundleError, match="by the recipe 'imported', which the recipe 'paper' cannot continue"):
        check_continued(bundle, "paper", RECIPES["paper"].continues)
    halved = import_source(llama, peft_source(folder), task="t", dtype="float16")
    assert halved.payload_keys.dtype is torch.float16
    assert torch.allclose(halved.payload_keys.float(), bundle.payload_keys, atol=1e-2)


@pytest.mark.parametrize("frozen", [0, 3])
def test_frozen_tokens_of_a_cartridge(frozen: int, llama_folder: Path, llama: Backbone, tmp_path: Path) -> None:
    keys, values = save_cartridge(tmp_path / "c.pt", 2, 3, 8, frozen=frozen)
    bundle = import_source(llama, cartridge_source(tmp_path / "c.pt"), task="t")
    check(llama, bundle, behind_cache(llama_folder, keys, values, inputs_of(llama), ANSWER))


def test_a_text_as_a_turn(llama_folder: Path, llama: Backbone, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    bundle = import_source(llama, text_source(tmp_path / "text.txt", "system"), task="t")
    ids = llama.tokenizer(f"<|im_start|>system\n{TEXT}<|im_end|>\n")["input_ids"]
    assert bundle.payload_tokens == len(ids)
    check(llama, bundle, behind_text(llama_folder, ids, inputs_of(llama), ANSWER))


@pytest.mark.slow
@pytest.mark.parametrize("name", EXACT)
def test_every_family(name: str, tmp_path: Path) -> None:
    check_all(FAMILIES[name](tmp_path / "model"), tmp_path)


@pytest.mark.parametrize(
    ("save", "problem"),
    [
        (rope(rope_type="dynamic", factor=2.0), "those of 'dynamic' depend on the length of a request"),
        (
            rope(rope_type="longrope", short_factor=[1.0] * 4, long_factor=[2.0] * 4, **LONGER),
            "those of 'longrope' depend on the length",
        ),
        (FAMILIES["olmo3"], "needs full attention in every layer, found a sliding window in 2 of 4"),
        (FAMILIES["llama4"], "found a sliding window in 2 of 4"),  # chunks
        (FAMILIES["ministral3"], "attention to distances alone"),  # which scales queries by their position
        (LATENT_FAMILIES["deepseek-v2"], r"found multi-head latent attention \(MLA\)"),
        (save_lfm2, "needs full attention in every layer, found it in"),
    ],
)
def test_what_would_not_be_exact(save: Callable[[Path], Path], problem: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=problem):
        require_distances(Backbone.load(save(tmp_path / "model")))
