"""What the servers of a run are started with, made without a single weight, and the room that they need."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from transformers import AutoConfig

from benchmarks.geometries import GEOMETRIES
from benchmarks.serving.bundles import make_adapter, make_bundles
from benchmarks.serving.cells import Cell
from benchmarks.serving.methods import LORA, PROMPT_REPLAY, Method
from benchmarks.serving.model import make_folder, without_weights
from inducekv_vllm.bundle import read_bundle
from selector.update.measures import entry_bytes
from server.demo import CHECKPOINT

GIB = 1 << 30
LEAST_CACHE_TOKENS = 8192  # of a KV cache
PER_SERVER_GIB = 5  # on a GPU: context, activations, graphs, memory's pool
ANSWERED_TOKENS = 64  # of a conversation before its second turn, and the question there


@dataclass(frozen=True)
class Files:
    """Of one model."""

    model: Path
    is_dummy: bool  # vLLM makes the weights
    bundles: dict[str, Path]
    adapter: Path
    entries: int  # of all bundles
    stored_bytes: dict[str, int]  # of each bundle, and of the adapter
    weights_bytes: int
    token_bytes: int  # of a KV cache


def model_folder(name: str, layers: int | None, dtype: str, work: Path) -> tuple[Path, bool]:
    """Of "demo", a checkpoint or a geometry, cut to its first `layers`; and whether it is without weights."""
    if name not in GEOMETRIES:
        return (CHECKPOINT if name == "demo" else Path(name)), False
    geometry = GEOMETRIES[name]
    return make_folder(replace(geometry, layers=layers or geometry.layers), dtype, work / name), True


def make_files(model: Path, is_dummy: bool, names: Sequence[str], lora_rank: int, dtype: str, work: Path) -> Files:
    """The bundles of these names, and an adapter."""
    backbone = without_weights(model)
    numbers = sum(parameter.numel() for parameter in backbone.model.parameters())
    bundles = make_bundles(backbone, names, work)
    adapter, adapter_bytes = make_adapter(backbone, lora_rank, work)
    itemsize = getattr(torch, dtype).itemsize
    read = {name: read_bundle(path, verify=False) for name, path in bundles.items()}
    return Files(
        model,
        is_dummy,
        bundles,
        adapter,
        entries=sum(bundle.num_entries for bundle in read.values()),
        stored_bytes={name: entry_bytes(bundle) for name, bundle in read.items()} | {LORA: adapter_bytes},
        weights_bytes=numbers * itemsize,
        token_bytes=2 * itemsize * backbone.num_layers * backbone.num_kv_heads * backbone.head_dim,
    )


def context_of(model: Path) -> int:
    return int(AutoConfig.from_pretrained(model).get_text_config(decoder=True).max_position_embeddings)


def cache_tokens(plan: Mapping[Cell, Sequence[Method]], context: int, output_tokens: int) -> dict[Cell, int]:
    """What the KV cache has to hold for the requests of each cell, that none waits for another."""
    needed = {}
    for cell, methods in plan.items():
        longest = max((method.more_tokens for method in methods), default=0) + max(cell.lengths)
        whole = any(method.name == PROMPT_REPLAY for method in methods)
        request = context if whole else min(context, longest + output_tokens + ANSWERED_TOKENS)
        needed[cell] = cell.concurrency * request
    return needed


def cache_bytes(needed: Mapping[Cell, int], files: Files, servers: int) -> tuple[int, list[Cell]]:
    """Of each server's KV cache, and the cells that it has no room for beside the other servers on the GPU."""
    room = None
    if torch.cuda.is_available():
        free = torch.cuda.mem_get_info()[0]
        room = max(free // servers - files.weights_bytes - PER_SERVER_GIB * GIB, GIB)
    fitting = {cell for cell, tokens in needed.items() if room is None or tokens * files.token_bytes <= room}
    most = max([LEAST_CACHE_TOKENS, *(int(1.1 * needed[cell]) for cell in fitting)]) * files.token_bytes
    return (most if room is None else min(room, most)), [cell for cell in needed if cell not in fitting]


def flags(context: int, requests: int, pictures: int, kv_cache_bytes: int, dtype: str, is_dummy: bool) -> list[str]:
    """Of every server: `requests` at a time, each with up to so many pictures."""
    given = ["--dtype", dtype, "--max-model-len", str(context), "--max-num-seqs", str(requests), "--seed", "0"]
    given += ["--kv-cache-memory-bytes", str(kv_cache_bytes)]
    if pictures:
        given += ["--limit-mm-per-prompt", json.dumps({"image": pictures})]
    if is_dummy:
        given += ["--load-format", "dummy"]
    if torch.cuda.is_available():
        # Others, which vLLM prefers on some GPUs, give no log-sum-exp for merged memory. The three share one GPU, whose
        # free memory each would refuse to start with otherwise.
        given += ["--attention-backend", "FLASH_ATTN", "--gpu-memory-utilization", "0.15"]
    return given
