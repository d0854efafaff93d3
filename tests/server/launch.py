"""Servers of tiny models for tests: one with bundles, one with LoRA and a bundle that requests share."""

import json
import math
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from benchmarks.server_process import serving
from inducekv_vllm.vllm_seams.config import ADMIN_KEY_VARIABLE
from tests.engine.parity import EAGER, FEWER_PROCESSES, World, make_world
from tests.tiny_models import save_tiny_llava

# A test server must start beside other work on a small machine.
ADMIN_KEY = "the admin's key of the tests"
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    ADMIN_KEY_VARIABLE: ADMIN_KEY,
    "VLLM_MEDIA_FETCH_MAX_RETRIES": "1",  # a picture that cannot be fetched is refused without a pause
    "VLLM_SERVER_DEV_MODE": "1",  # to ask the workers what is in use
}
FLAGS = ["--dtype", "float32", "--max-model-len", "256", "--max-num-seqs", "8", "--enforce-eager"]
FEW_BLOCKS = ["--block-size", "32", "--num-gpu-blocks-override", "16"]
RANK, SCALE = 4, 2.0
STATE, FOUND = "state", "found"  # in the folder of a server's log: its state, and what its resolver finds


@dataclass(frozen=True)
class Adapted:
    url: str
    folder: Path  # has model/, adapter/ and merged/, and what the server has there
    plain: World  # the model as it is
    merged: World  # the model with the adapter merged into its weights


def save_adapter(model: Path, adapter: Path, merged: Path, seed: int = 0, **settings: Any) -> None:
    """A random adapter of the text model's q_proj and v_proj, and the model that has it merged in.

    Args:
        settings: of PEFT: `use_rslora`, `rank_pattern` and `alpha_pattern` of the two projections by name, and such
            that change nothing here.
    """
    generator = torch.Generator().manual_seed(seed)
    weights = load_file(model / "model.safetensors")
    factors: dict[str, torch.Tensor] = {}
    adapted = ("q_proj.weight", "v_proj.weight")
    for name in [n for n in weights if n.startswith("language_model.") and n.endswith(adapted)]:
        rows, columns = weights[name].shape
        projection = name.removesuffix(".weight").rpartition(".")[2]
        rank = settings.get("rank_pattern", {}).get(projection, RANK)
        alpha = settings.get("alpha_pattern", {}).get(projection, SCALE * RANK)
        a = 0.2 * torch.randn(rank, columns, generator=generator)  # [r, in]
        b = 0.2 * torch.randn(rows, rank, generator=generator)  # [out, r]
        scale = alpha / (math.sqrt(rank) if settings.get("use_rslora") else rank)
        weights[name] = weights[name].float() + scale * b @ a
        prefix = "base_model.model." + name.removesuffix(".weight")
        factors |= {f"{prefix}.lora_A.weight": a, f"{prefix}.lora_B.weight": b}
    assert factors
    shutil.copytree(model, merged)
    save_file(weights, merged / "model.safetensors", metadata={"format": "pt"})
    adapter.mkdir()
    save_file(factors, adapter / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": SCALE * RANK, "target_modules": ["q_proj", "v_proj"]}
    config |= {"task_type": "CAUSAL_LM", "bias": "none"}
    (adapter / "adapter_config.json").write_text(json.dumps(config | settings))


def make_tiny_world(folder: Path) -> World:
    return make_world(save_tiny_llava(folder / "model"), folder, with_merged=True)


@contextmanager
def serving_bundles(world: World, log: Path) -> Iterator[str]:
    """Base URL of a server of the model "base" with the bundles "first" and "second"; others are left to load.

    It holds loads where a test wants it: see `HoldingWorker`.
    """
    memory = [f"--memory={name}={world.paths[name]}" for name in ("first", "second")]
    root = ["--memory-page", "--memory-root", str(log.parents[1])]  # that of all temporary folders of the tests
    (log.parent / FOUND).mkdir()
    root += ["--memory-resolver", str(log.parent / FOUND)]
    kept = [f"--memory-state={log.parent / STATE}", "--memory-audit-answers"]
    arguments = [str(world.model), *memory, *root, *kept, *FLAGS, *FEW_BLOCKS, "--served-model-name", "base"]
    arguments += ["--worker-cls", "tests.server.ranks.HoldingWorker"]
    # An idle worker process waits in a loop that takes a core; here there is none.
    with serving(arguments, log, {**ENVIRONMENT, **FEWER_PROCESSES, **EAGER}) as url:
        yield url


@contextmanager
def serving_adapter(folder: Path) -> Iterator[Adapted]:
    """A server of the model "base" with the adapter "style" and the bundle "m"; others can be loaded.

    Requests to any bundle have the plain model's "first" beside it, as "manual", unless they name their memories.
    """
    model = save_tiny_llava(folder / "model")
    save_adapter(model, folder / "adapter", folder / "merged")
    for name in ("plain", "with", FOUND):
        (folder / name).mkdir()
    plain = make_world(model, folder / "plain", with_merged=True)
    merged = make_world(folder / "merged", folder / "with")
    lora = ["--enable-lora", "--max-lora-rank", "8", "--lora-modules", f"style={folder / 'adapter'}"]
    memory = [f"--memory=m={plain.paths['first']}", f"--memory=manual={plain.paths['first']}"]
    memory += ["--memory-shared", "manual", "--memory-root", str(folder.parent), "--memory-audit-answers"]
    memory += [f"--memory-state={folder / STATE}", "--memory-resolver", str(folder / FOUND)]
    memory += ["--additional-config", '{"inducekv": {"max_memories": 2}}']  # any second memory may be named
    arguments = [str(model), *memory, *FLAGS, *FEW_BLOCKS, *lora, "--served-model-name", "base"]
    environment = {**ENVIRONMENT, **FEWER_PROCESSES, **EAGER, "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
    with serving(arguments, folder / "log", environment) as url:
        yield Adapted(url, folder, plain, merged)


def process_of(log: Path, part: str) -> int:
    """The process that writes as this part of the server."""
    return int(log.read_text().partition(f"({part} pid=")[2].partition(")")[0])


GATED_TASKS = ("a", None, "b", None)  # what the gate of `gated_bundle` decides for each of `questions`
