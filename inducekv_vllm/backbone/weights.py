"""What tells the weights of one checkpoint from those of a fine-tune: a digest of samples, cheap at any size.

Of each tensor, by name, it covers dtype, shape and a few spans of bytes. So it does not depend on how a checkpoint is
divided into files. Training moves all of a tensor; a change of single numbers may be missed. No model is loaded, so it
is the same for the selector and for a server, on every platform.
"""

import contextlib
import hashlib
import itertools
import json
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from transformers.utils.hub import cached_file

from ..errors import UnsupportedModel

INDEX: Final = "model.safetensors.index.json"
SINGLE: Final = "model.safetensors"
OTHER_FORMATS: Final = ("*.bin", "*.pt", "*.pth", "*.gguf", "*.h5", "*.msgpack")
NO_WEIGHTS: Final = "none"  # of a folder without any, which vLLM serves with `--load-format dummy`
SPANS: Final = 4  # of each tensor, of which the first begins with it and the last ends with it
SPAN_BYTES: Final = 256


@dataclass(frozen=True)
class _Stored:
    file: Path
    kind: str  # dtype and shape
    begin: int  # place of its bytes in the file
    size: int  # in bytes


def weights_digest(model: str | Path, revision: str | None = None, cache: str | None = None) -> str:
    """The sha256 of a checkpoint's weights, which are on this machine already; `NO_WEIGHTS` of a folder without any.

    Args:
        cache: where a model of the hub was fetched to (default: the hub's own cache).

    Raises:
        UnsupportedModel: the weights are no safetensors files, or these cannot be read.
    """
    folder = _folder(model, revision, cache)
    sha = hashlib.sha256()
    with _reading(model):
        stored = _stored(folder, model)
        if not stored:
            return NO_WEIGHTS
        spans: dict[str, bytes] = {}
        in_place = sorted(stored, key=lambda name: (stored[name].file, stored[name].begin))
        for path, names in itertools.groupby(in_place, key=lambda name: stored[name].file):
            with path.open("rb") as file:
                for name in names:
                    spans[name] = b"".join(os.pread(file.fileno(), size, at) for at, size in _sampled(stored[name]))
    for name in sorted(stored):
        sha.update(json.dumps([name, stored[name].kind, spans[name].hex()]).encode() + b"\n")
    return sha.hexdigest()


def stored_tensors(model: str | Path, revision: str | None = None, cache: str | None = None) -> dict[str, Path]:
    """The files that a checkpoint's tensors lie in, by name; see `weights_digest`."""
    with _reading(model):
        return {name: tensor.file for name, tensor in _stored(_folder(model, revision, cache), model).items()}


@contextlib.contextmanager
def _reading(model: str | Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UnsupportedModel(f"{model}: cannot read the weights: {type(error).__name__}: {error}") from error


def _folder(model: str | Path, revision: str | None, cache: str | None) -> Path:
    if Path(model).is_dir():
        return Path(model)
    for name in (INDEX, SINGLE):
        where = {"revision": revision, "cache_dir": cache, "local_files_only": True}
        if found := cached_file(str(model), name, **where, _raise_exceptions_for_missing_entries=False):
            return Path(found).parent
    raise UnsupportedModel(
        f"{model}: expected weights in safetensors files, by which a bundle knows its model, found none"
    )


def _stored(folder: Path, model: str | Path) -> dict[str, _Stored]:
    """The tensors by name. A folder may hold other files, such as an adapter or the same weights once more."""
    if (folder / INDEX).is_file():
        index: dict[str, str] = json.loads((folder / INDEX).read_bytes())["weight_map"]
        headers = {file: _header(folder / file) for file in sorted(set(index.values()))}
        return {name: headers[file][name] for name, file in index.items()}
    if (folder / SINGLE).is_file():
        return _header(folder / SINGLE)
    if files := sorted(folder.glob("*.safetensors")):
        return {name: tensor for file in files for name, tensor in _header(file).items()}
    if others := sorted(file.name for pattern in OTHER_FORMATS for file in folder.glob(pattern)):
        raise UnsupportedModel(
            f"{model}: expected weights in safetensors files, by which a bundle knows its model, found {others[0]}; "
            "save the model with `save_pretrained`"
        )
    return {}


def _header(path: Path) -> dict[str, _Stored]:
    """What a file says of its tensors [https://github.com/huggingface/safetensors#format]."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > path.stat().st_size:
            raise ValueError(f"the header of {path.name} is longer than the file")
        header: dict[str, Any] = json.loads(file.read(length))
    tensors = {}
    for name, stored in header.items():
        if name != "__metadata__":
            begin, end = stored["data_offsets"]
            tensors[name] = _Stored(path, f"{stored['dtype']} {stored['shape']}", 8 + length + begin, end - begin)
    return tensors


def _sampled(tensor: _Stored) -> Iterator[tuple[int, int]]:
    """Places in the file and sizes of the spans that count; they cover a small tensor whole."""
    if tensor.size <= SPANS * SPAN_BYTES:
        yield tensor.begin, tensor.size
        return
    for span in range(SPANS):
        yield tensor.begin + math.floor(span * (tensor.size - SPAN_BYTES) / (SPANS - 1)), SPAN_BYTES
