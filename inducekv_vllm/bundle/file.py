"""Bundle files: one safetensors file with the tensors of `Bundle` and one metadata entry, `inducekv`.

The entry is the JSON of `BundleMetadata`. Reading never executes or unpickles anything, and `read_bundle` checks all
content before use.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import safetensors
import safetensors.torch
import torch
from pydantic import ValidationError

from ..errors import BundleError
from .metadata import FORMAT_VERSIONS, BundleMetadata, check_metadata, first_problem
from .tensors import DTYPES, Bundle, check_bundle, check_structure, check_values, expected_shapes

METADATA_KEY = "inducekv"
MAX_HEADER_BYTES = 16 * 2**20
_SAFETENSORS_DTYPES = {torch.float16: "F16", torch.float32: "F32"}


def write_bundle(bundle: Bundle, path: str | os.PathLike[str]) -> None:
    """Write a bundle atomically: `path` holds either its old content or the complete new one.

    Raises:
        BundleError: the bundle is inconsistent, its digest is stale, or the file cannot be written (missing folder,
            full disk, ...). No temporary file is left behind.
    """
    target = Path(path)
    check_bundle(bundle, str(target))
    metadata = {METADATA_KEY: bundle.metadata.model_dump_json()}
    if len(metadata[METADATA_KEY]) > MAX_HEADER_BYTES // 2:  # JSON inside JSON at most doubles by escaping quotes
        raise BundleError(f"{target}: the metadata is too large for the header: {len(metadata[METADATA_KEY])} bytes")
    try:
        with _replacing(target) as temporary:
            safetensors.torch.save_file(bundle.tensors(), temporary, metadata=metadata)
    except (OSError, safetensors.SafetensorError) as error:
        raise BundleError(f"{target}: cannot write the bundle: {error}") from error


def read_bundle(path: str | os.PathLike[str], *, verify: bool = True) -> Bundle:
    """Read a bundle into memory; the file may be replaced or removed afterwards.

    Args:
        verify: also check values: the digest, finite payloads, unit-norm keys, ranges of the calibration. Otherwise
            only the structure is checked: header, metadata, names, dtypes, shapes, file size.

    Raises:
        BundleError: names the file and the problem.
    """
    source = Path(path)
    header = _read_header(source)
    metadata = _parse_metadata(header, source)
    _check_layout(header, metadata, source)
    try:
        tensors = safetensors.torch.load(source.read_bytes())
    except (OSError, safetensors.SafetensorError) as error:
        raise BundleError(f"{source}: cannot read the tensors: {error}") from error
    if set(tensors) != set(expected_shapes(metadata)):
        raise BundleError(f"{source}: the file changed while it was read")
    bundle = Bundle(**tensors, metadata=metadata)
    check_structure(bundle, str(source))
    if verify:
        check_values(bundle, str(source))
    return bundle


def _read_header(source: Path) -> dict[str, Any]:
    """Read the safetensors header as JSON; check sizes before parsing or allocating."""
    if not source.is_file():
        raise BundleError(f"{source}: {'not a regular file' if source.exists() else 'no such file'}")
    try:
        with source.open("rb") as file:
            text = file.read(_header_bytes(file, source))
    except OSError as error:
        raise BundleError(f"{source}: cannot read the bundle: {error.strerror}") from error
    try:
        header = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BundleError(f"{source}: the header is not JSON, this is no safetensors file") from error
    if not isinstance(header, dict):
        raise BundleError(f"{source}: the header is not a JSON object, this is no safetensors file")
    return header


def _header_bytes(file: BinaryIO, source: Path) -> int:
    """Read the header's length from the first 8 bytes; the file position is then at the header."""
    size = os.fstat(file.fileno()).st_size
    if size == 0:
        raise BundleError(f"{source}: the file is empty")
    if size < 8:
        raise BundleError(f"{source}: truncated: {size} bytes are too few for a safetensors file")
    length = int.from_bytes(file.read(8), "little")
    if length > MAX_HEADER_BYTES:
        raise BundleError(f"{source}: the header claims {length} bytes, at most {MAX_HEADER_BYTES} are allowed")
    if 8 + length > size:
        raise BundleError(f"{source}: truncated: the header claims {length} bytes, the file has {size}")
    return length


def _parse_metadata(header: dict[str, Any], source: Path) -> BundleMetadata:
    entry = header.get("__metadata__")
    text = entry.get(METADATA_KEY) if isinstance(entry, dict) else None
    if not isinstance(text, str):
        raise BundleError(f"{source}: no {METADATA_KEY!r} metadata: a safetensors file, but not a memory bundle")
    try:
        raw = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BundleError(f"{source}: the {METADATA_KEY!r} metadata is not JSON: {error}") from error
    version = raw.get("format_version") if isinstance(raw, dict) else None
    if version not in FORMAT_VERSIONS:
        supported = ", ".join(map(str, FORMAT_VERSIONS))
        raise BundleError(f"{source}: format version {version!r} is not supported, expected one of {supported}")
    try:
        metadata = BundleMetadata.model_validate_json(text)
    except ValidationError as error:
        raise BundleError(f"{source}: metadata: {first_problem(error)}") from error
    check_metadata(metadata, str(source))
    return metadata


def _check_layout(header: dict[str, Any], metadata: BundleMetadata, source: Path) -> None:
    """Check names, dtypes, shapes and the file's size from the header, before reading any tensor."""
    shapes = expected_shapes(metadata)
    names = set(header) - {"__metadata__"}
    if missing := set(shapes) - names:
        raise BundleError(f"{source}: tensors are missing: {', '.join(sorted(missing))}")
    if unknown := names - set(shapes):
        raise BundleError(f"{source}: unknown tensors: {', '.join(sorted(unknown))}")
    tensor_bytes = 0
    for name, shape in shapes.items():
        entry = header[name] if isinstance(header[name], dict) else {}
        dtype = _SAFETENSORS_DTYPES[DTYPES[name]]
        if (entry.get("dtype"), entry.get("shape")) != (dtype, list(shape)):
            raise BundleError(
                f"{source}: {name} must be {dtype} {list(shape)}, found {entry.get('dtype')} {entry.get('shape')}"
            )
        tensor_bytes += math.prod(shape) * DTYPES[name].itemsize
    with source.open("rb") as file:
        expected = 8 + _header_bytes(file, source) + tensor_bytes
        size = os.fstat(file.fileno()).st_size
    if size != expected:
        problem = "truncated" if size < expected else "trailing bytes"
        raise BundleError(f"{source}: {problem}: expected {expected} bytes, found {size}")


@contextlib.contextmanager
def _replacing(target: Path) -> Iterator[Path]:
    """Yield a temporary path beside `target`. On success, sync it and move it to `target`; otherwise remove it."""
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(8)}.tmp")
    temporary.open("xb").close()
    try:
        yield temporary
        _fsync(temporary)
        os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _fsync(target.parent)  # the rename itself


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
