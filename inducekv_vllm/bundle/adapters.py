"""LoRA adapters on disk, as PEFT writes them: what a bundle records of one, and whether it is still the same."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import BundleError

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


@dataclass(frozen=True)
class AdapterFiles:
    """The facts of an adapter that do not need its weights."""

    digest: str  # sha256 over configuration and weights
    rank: int  # the largest of its modules


def read_adapter(folder: Path) -> AdapterFiles:
    """Read the configuration of an adapter and hash its files.

    Raises:
        BundleError: a file is missing or unreadable, or it is no LoRA adapter.
    """
    sha = hashlib.sha256()
    try:
        for name in (CONFIG, WEIGHTS):
            with (folder / name).open("rb") as file:
                sha.update(hashlib.file_digest(file, "sha256").digest())
        config: Any = json.loads((folder / CONFIG).read_bytes())
    except OSError as error:
        raise BundleError(f"{folder}: cannot read the LoRA adapter: {error.strerror}: {error.filename}") from error
    except ValueError as error:
        raise BundleError(f"{folder / CONFIG}: not JSON: {error}") from error
    kind = config.get("peft_type") if isinstance(config, dict) else None
    if kind != "LORA":
        raise BundleError(f"{folder / CONFIG}: expected the peft_type 'LORA', found {kind!r}")
    ranks = [config.get("r"), *(config.get("rank_pattern") or {}).values()]
    if not all(isinstance(rank, int) and rank >= 1 for rank in ranks):
        raise BundleError(f"{folder / CONFIG}: expected positive ranks, found {ranks}")
    return AdapterFiles(sha.hexdigest(), max(ranks))
