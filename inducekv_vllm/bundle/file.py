"""Bundle files: one safetensors file with the tensors of `Bundle` and the metadata entry `inducekv`.

The entry is the JSON of `BundleMetadata` and of the signature: one entry, because safetensors writes several in random
order. Reading never executes or unpickles anything, and `read_bundle` checks all content before use.
"""

import json
import math
import os
from collections import Counter
from io import BufferedReader
from pathlib import Path
from reprlib import repr as shown
from typing import Any

import torch
from pydantic import ValidationError
from pydantic_core import from_json
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from ..errors import BundleError
from ..files.regular import open_regular
from ..files.whole import replacing
from ..pace import rest
from .metadata import FORMAT_VERSION, BackboneFingerprint, BundleMetadata, check_metadata, first_problem
from .signature import Signature
from .tensors import Bundle, check_shapes, check_structure, check_values, dtypes_of, expected_shapes, require_backbone

METADATA_KEY = "inducekv"
MAX_HEADER_BYTES = 24 * 2**20
MAX_SERVED_BYTES = 4 * 2**30  # of a file that a server reads
_SAFETENSORS_DTYPES = {torch.float16: "F16", torch.float32: "F32", torch.int32: "I32"}


class _MetadataEntry(BundleMetadata):
    signature: Signature | None = None


def write_bundle(bundle: Bundle, path: str | os.PathLike[str], *, verify: bool = True) -> None:
    """Write a bundle atomically: `path` holds either its old content or the complete new one.

    Args:
        verify: check values first, as `read_bundle` does; False for a bundle that `read_bundle` has just checked.

    Raises:
        BundleError: the bundle is inconsistent, its digest is stale (if `verify`), it has more metadata than
            `read_bundle` takes, or the file cannot be written (missing folder, full disk, ...). No temporary file is
            left behind.
    """
    target = Path(path)
    check_structure(bundle, str(target))
    if verify:
        check_values(bundle, str(target))
    content = file_content(bundle, str(target))
    try:
        with replacing(target) as temporary:
            temporary.write_bytes(content)
    except OSError as error:
        raise BundleError(f"{target}: cannot write the bundle: {error}") from error


def file_content(bundle: Bundle, name: str = "bundle") -> bytes:
    """All of a bundle's file. Raises BundleError: it has more metadata than `read_bundle` takes."""
    entry = _MetadataEntry.model_construct(**dict(bundle.metadata), signature=bundle.signature)
    tensors = {name: tensor.contiguous() for name, tensor in bundle.tensors().items()}
    content = save(tensors, {METADATA_KEY: entry.model_dump_json()})
    if (length := _header_length(content)) > MAX_HEADER_BYTES:
        raise BundleError(
            f"{name}: the metadata is too large: a header of {length} bytes, expected {MAX_HEADER_BYTES} at most"
        )
    return content


def read_bundle(
    path: str | os.PathLike[str],
    *,
    verify: bool = True,
    backbone: BackboneFingerprint | None = None,
    digest: str | None = None,
    max_bytes: int | None = None,
    name: str | None = None,
) -> Bundle:
    """Read a bundle into memory; the file may be replaced or removed afterwards.

    The header decides first: nothing behind it is read from a file of the wrong size, or of another backbone.

    Args:
        verify: also check values: the digest, finite payloads, unit-norm keys, ranges of the calibration. Otherwise
            only the structure is checked: header, metadata, names, dtypes, shapes, file size.
        backbone: refuse a bundle that was made for another one.
        digest: refuse another version.
        max_bytes: refuse a larger file.
        name: what messages call the file (default: its path).

    Raises:
        BundleError: names the file and the problem.
        FingerprintMismatch: lists every difference to `backbone`.
    """
    source = name or str(path)
    try:
        with _opened(path, source) as file:
            size = os.fstat(file.fileno()).st_size
            if max_bytes is not None and size > max_bytes:
                raise BundleError(f"{source}: the file has {size} bytes, more than the limit of {max_bytes}")
            start = _read_start(file, size, source)
            header = _parse_header(start, source)
            entry = _parse_metadata(header, source)
            _require_single_names(start, header, source)
            _check_header(header, entry, len(start), size, source)
            if backbone is not None:
                require_backbone(entry, backbone, source)
            if digest is not None and entry.digest != digest:
                raise BundleError(f"{source}: the file has changed: expected digest {digest}, found {entry.digest}")
            tensors = _read_tensors(file, start, size, source)
    except OSError as error:
        raise BundleError(f"{source}: cannot read the bundle: {error.strerror}") from error
    metadata = BundleMetadata.model_construct(**{name: getattr(entry, name) for name in BundleMetadata.model_fields})
    bundle = Bundle.of_file(tensors, metadata, entry.signature)
    check_shapes(bundle, source)  # the metadata was checked with the header
    if verify:
        check_values(bundle, source)
    return bundle


def _opened(path: str | os.PathLike[str], source: str) -> BufferedReader:
    try:
        return os.fdopen(open_regular(path), "rb")
    except FileNotFoundError as error:
        raise BundleError(f"{source}: no such file") from error
    except ValueError as error:
        raise BundleError(f"{source!r}: not the name of a file: {error}") from error


def _header_length(content: bytes) -> int:
    """Of the JSON that a safetensors file begins with, after these 8 bytes."""
    return int.from_bytes(content[:8], "little")


def _read_start(file: BufferedReader, size: int, source: str) -> bytes:
    """Read a file up to its tensors; check sizes before allocating."""
    if size == 0:
        raise BundleError(f"{source}: the file is empty")
    if size < 8:
        raise BundleError(f"{source}: truncated: {size} bytes are too few for a safetensors file")
    start = file.read(8)
    if (length := _header_length(start)) > MAX_HEADER_BYTES:
        raise BundleError(
            f"{source}: the header is longer than {MAX_HEADER_BYTES} bytes, this is no safetensors file of a bundle"
        )
    if 8 + length > size:
        raise BundleError(f"{source}: truncated: the header is longer than the file, which has {size} bytes")
    return start + file.read(length)


def _parse_header(start: bytes, source: str) -> dict[str, Any]:
    """Messages quote nothing of a file that is no bundle: the server answers with them."""
    try:
        header = from_json(start[8:])
    except ValueError as error:
        raise BundleError(f"{source}: the header is not JSON, this is no safetensors file") from error
    if not isinstance(header, dict):
        raise BundleError(f"{source}: the header is not a JSON object, this is no safetensors file")
    rest()
    return header


def _parse_metadata(header: dict[str, Any], source: str) -> _MetadataEntry:
    entries = header.get("__metadata__")
    text = entries.get(METADATA_KEY) if isinstance(entries, dict) else None
    if not isinstance(text, str):
        raise BundleError(f"{source}: no {METADATA_KEY!r} metadata: a safetensors file, but not a memory bundle")
    try:
        entry = _MetadataEntry.model_validate_json(text)
    except ValidationError as error:
        _require_version(text, source)
        raise BundleError(f"{source}: metadata: {first_problem(error)}") from error
    rest()
    check_metadata(entry, source)
    rest()
    return entry


def _require_single_names(start: bytes, header: dict[str, Any], source: str) -> None:
    """A name that an object has twice stands for its last value here, and for its first one with other readers."""

    def named(pairs: list[tuple[str, Any]]) -> None:
        if len({name for name, _ in pairs}) < len(pairs):
            ((name, _),) = Counter(name for name, _ in pairs).most_common(1)
            raise BundleError(f"{source}: the header names {shown(name)} twice")

    for text in (start[8:], header["__metadata__"][METADATA_KEY]):
        json.loads(text, object_pairs_hook=named)
        rest()


def _require_version(text: str, source: str) -> None:
    """Refuse metadata of another format version, whatever else is wrong with it."""
    try:
        raw = from_json(text)
    except ValueError as error:
        raise BundleError(f"{source}: the {METADATA_KEY!r} metadata is not JSON") from error
    version = raw.get("format_version") if isinstance(raw, dict) else None
    if version != FORMAT_VERSION:
        raise BundleError(f"{source}: format version {shown(version)} is not supported, expected {FORMAT_VERSION}")


def _check_header(header: dict[str, Any], metadata: BundleMetadata, start_bytes: int, size: int, source: str) -> None:
    """Check the tensors' names, dtypes and shapes and the file's size, before any tensor is read."""
    shapes, dtypes = expected_shapes(metadata), dtypes_of(metadata)
    names = set(header) - {"__metadata__"}
    if missing := set(shapes) - names:
        raise BundleError(f"{source}: tensors are missing: {', '.join(sorted(missing))}")
    if unknown := names - set(shapes):
        raise BundleError(f"{source}: unknown tensors: {', '.join(sorted(unknown)):.200}")
    for name, shape in shapes.items():
        entry = header[name] if isinstance(header[name], dict) else {}
        dtype = _SAFETENSORS_DTYPES[dtypes[name]]
        if (entry.get("dtype"), entry.get("shape")) != (dtype, list(shape)):
            named = entry.get("dtype")
            found = f"{f'{named:.20}' if isinstance(named, str) else shown(named)} {shown(entry.get('shape'))}"
            raise BundleError(f"{source}: {name} must be {dtype} {list(shape)}, found {found}")
    expected = start_bytes + sum(math.prod(shape) * dtypes[name].itemsize for name, shape in shapes.items())
    if size != expected:
        problem = "truncated" if size < expected else "trailing bytes"
        raise BundleError(f"{source}: {problem}: expected {expected} bytes, found {size}")


def _read_tensors(file: BufferedReader, start: bytes, size: int, source: str) -> dict[str, Tensor]:
    """The tensors of a file whose `start` has been checked."""
    file.seek(0)
    try:
        content = file.read(size)
        if len(content) != size or not content.startswith(start):
            raise BundleError(f"{source}: the file changed while it was read")
        tensors: dict[str, Tensor] = load(content)
    except SafetensorError as error:
        raise BundleError(f"{source}: not a safetensors file: {error}") from error
    except MemoryError as error:
        raise BundleError(f"{source}: there is not enough memory to read the bundle") from error
    rest()
    return tensors
