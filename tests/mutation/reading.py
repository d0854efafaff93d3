"""What a mutated file is read with: the functions that everything in the repository reads these files with."""

from __future__ import annotations

import contextlib
import hashlib
from pathlib import Path
from typing import Any

import torch

from inducekv_vllm.bundle import Bundle, read_bundle, read_signature
from inducekv_vllm.errors import BundleError
from selector.data.examples import read_task


def read_bundle_file(
    path: Path, max_bytes: int | None = None, known: frozenset[str] | None = None
) -> dict[str, str | list[int] | None]:
    """The digest of a bundle, the entries of which the payloads were read (None: of all), and a digest of the tensors.

    `known` are the payload digests of which the reader has the payloads; None for a reader that asks for all.
    """
    with contextlib.suppress(BundleError):  # `read_bundle` says the same
        read_signature(path)
    read = read_bundle(path, max_bytes=max_bytes, known=None if known is None else lambda digests: known)
    rows = None if read.rows is None else read.rows.tolist()
    return {"digest": read.digest, "rows": rows, "tensors": tensors_digest(stored_tensors(read))}


def read_task_file(path: Path) -> list[dict[str, Any]]:
    """What each example of a task file holds."""
    return [
        {"id": e.id, "task": e.task, "answer": e.answer, "images": len(e.images), "digest": e.source_digest}
        for e in read_task(path)
    ]


def stored_tensors(read: Bundle) -> dict[str, tuple[str, list[int], bytes]]:
    """By name: the type as safetensors names it, the shape, and the bytes."""
    names = {torch.float16: "F16", torch.float32: "F32"}
    return {
        name: (names[t.dtype], list(t.shape), t.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        for name, t in read.tensors().items()
    }


def tensors_digest(tensors: dict[str, tuple[str, list[int], bytes]]) -> str:
    """sha256 of tensors as `stored_tensors` gives them."""
    sha = hashlib.sha256()
    for name, (dtype, shape, content) in sorted(tensors.items()):
        sha.update(f"{name} {dtype} {shape}\n".encode() + content)
    return sha.hexdigest()
