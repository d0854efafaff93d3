"""Bundle files: one safetensors file with the tensors of `Bundle` and the metadata entry `inducekv`.

The entry is the JSON of `BundleMetadata`; a signed bundle also has the entry `inducekv_signature`. Reading never
executes or unpickles anything, and `read_bundle` checks all content before use.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import stat
from collections.abc import Callable, Container, Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from reprlib import repr as shown
from typing import Any

import numpy as np
import torch
from pydantic import ValidationError
from pydantic_core import from_json
from torch import Tensor

from ..errors import BundleError
from ..files.whole import replacing
from ..pace import rest
from ..retrieval.page_terms import IntArray
from .metadata import FORMAT_VERSIONS, BackboneFingerprint, BundleMetadata, check_metadata, first_problem
from .runs import runs_of
from .signature import SIGNATURE_KEY, Signature
from .spans import Span, read_spans
from .tensors import (
    DTYPES,
    PAYLOADS,
    Bundle,
    check_shapes,
    check_structure,
    check_values,
    expected_shapes,
    require_backbone,
)

METADATA_KEY = "inducekv"
# Until there were payload digests, it was 4 MiB. With their digests the entries fit into this, so that entries of any
# older bundle can be forgotten.
MAX_HEADER_BYTES = 6 * 2**20
MAX_SIGNATURE_LENGTH = 1000
_SAFETENSORS_DTYPES = {torch.float16: "F16", torch.float32: "F32"}


def write_bundle(bundle: Bundle, path: str | os.PathLike[str], *, verify: bool = True) -> None:
    """Write a bundle atomically: `path` holds either its old content or the complete new one.

    Args:
        verify: check values first, as `read_bundle` does; False for a bundle that `read_bundle` has just checked.

    Raises:
        BundleError: the bundle is inconsistent, its digest is stale (if `verify`), it has more metadata than
            `read_bundle` takes, or the file cannot be written (missing folder, full disk, ...). No temporary file is
            left behind.
    """
    assert bundle.rows is None, "the bundle was read in part"
    target = Path(path)
    check_structure(bundle, str(target))
    if verify:
        check_values(bundle, str(target))
    metadata = {METADATA_KEY: bundle.metadata.model_dump_json()}
    if bundle.signature is not None:
        metadata[SIGNATURE_KEY] = bundle.signature.model_dump_json()
    header = _header(bundle.tensors(), metadata)
    if len(header) > MAX_HEADER_BYTES:
        raise BundleError(f"{target}: the metadata is too large: a header of {len(header)} bytes")
    try:
        with replacing(target) as temporary:
            save_tensors(bundle.tensors(), header, temporary)
    except OSError as error:
        raise BundleError(f"{target}: cannot write the bundle: {error}") from error


def _names_in_file(tensors: Mapping[str, Tensor]) -> list[str]:
    """As in the library, larger types first: each tensor begins at a multiple of its type's size."""
    return sorted(tensors, key=lambda name: (-tensors[name].itemsize, name))


def _header(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> bytes:
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for name in _names_in_file(tensors):
        tensor = tensors[name]
        span = [end, end := end + tensor.nbytes]
        header[name] = {"dtype": _SAFETENSORS_DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": span}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    return text + b" " * (-len(text) % 8)


def save_tensors(tensors: Mapping[str, Tensor], header: bytes, path: Path) -> None:
    """Write a safetensors file [https://github.com/huggingface/safetensors#format], from the tensors' own memory.

    Raises:
        OSError: it cannot be written.
    """
    with io.FileIO(path, "w") as file:
        _write_whole(file, memoryview(len(header).to_bytes(8, "little") + header))
        for name in _names_in_file(tensors):
            _write_whole(file, tensors[name].contiguous().reshape(-1).view(torch.uint8).numpy().data)


def _write_whole(file: io.FileIO, content: memoryview) -> None:
    while content.nbytes:
        content = content[file.write(content) :]


def read_bundle(
    path: str | os.PathLike[str],
    *,
    verify: bool = True,
    backbone: BackboneFingerprint | None = None,
    max_bytes: int | None = None,
    name: str | None = None,
    known: Callable[[Sequence[str]], Container[Hashable]] | None = None,
) -> Bundle:
    """Read a bundle into memory; the file may be replaced or removed afterwards.

    The header decides first: nothing behind it is read from a file of the wrong size, or of another backbone.

    Args:
        verify: also check values: the digest, finite payloads, unit-norm keys, ranges of the calibration. Otherwise
            only the structure is checked: header, metadata, names, dtypes, shapes, file size.
        backbone: refuse a bundle that was made for another one.
        max_bytes: refuse a larger file.
        name: what messages call the file (default: its path).
        known: is called with the payload digests [B] of a file that has any, and tells which payloads the caller has
            already. They are not checked, and not kept if they are read: the bundle has the `rows` of the others alone.

    Raises:
        BundleError: names the file and the problem.
        FingerprintMismatch: lists every difference to `backbone`.
    """
    source = name or str(path)
    with _opened(path, source) as file:
        size = os.fstat(file.fileno()).st_size
        if max_bytes is not None and size > max_bytes:
            raise BundleError(f"{source}: the file has {size} bytes, more than the limit of {max_bytes}")
        header, header_bytes = _read_header(file, size, source)
        metadata = _parse_metadata(header, source)
        signature = _parse_signature(header, source)
        starts = _check_layout(header, metadata, 8 + header_bytes, size, source)
        if backbone is not None:
            require_backbone(metadata, backbone, source)
        rows = None if known is None else _unknown_rows(metadata.payload_digests, known)
        tensors = _read_tensors(file, starts, metadata, rows, source)
    bundle = Bundle(**tensors, metadata=metadata, signature=signature, rows=rows)
    check_shapes(bundle, source)  # the metadata was checked with the header
    if verify:
        check_values(bundle, source)
    return bundle


@contextlib.contextmanager
def _opened(path: str | os.PathLike[str], source: str) -> Iterator[io.FileIO]:
    """Open a regular file for reading. The open file is the one that is checked and read, whatever its name becomes."""
    try:
        # A pipe would wait for its writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError as error:
        raise BundleError(f"{source}: no such file") from error
    except OSError as error:
        raise BundleError(f"{source}: cannot read the bundle: {error.strerror}") from error
    except ValueError as error:
        raise BundleError(f"{source!r}: not the name of a file: {error}") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise BundleError(f"{source}: not a regular file")
    with io.FileIO(descriptor) as file:
        try:
            yield file
        except OSError as error:
            raise BundleError(f"{source}: cannot read the bundle: {error.strerror}") from error


def _unknown_rows(digests: Sequence[str], known: Callable[[Sequence[str]], Container[Hashable]]) -> IntArray | None:
    """The entries whose payloads are to be read; None for all."""
    if not digests:
        return None
    there = known(digests)
    rows = [row for row, digest in enumerate(digests) if digest not in there]
    return None if len(rows) == len(digests) else np.array(rows, dtype=np.int64)


def _read_tensors(
    file: io.FileIO, starts: Mapping[str, int], metadata: BundleMetadata, rows: IntArray | None, source: str
) -> dict[str, Tensor]:
    shapes = expected_shapes(metadata, rows)
    try:
        tensors = {name: torch.empty(shape, dtype=DTYPES[name]) for name, shape in shapes.items()}
    except (MemoryError, RuntimeError) as error:
        raise BundleError(f"{source}: there is not enough memory to read the bundle") from error
    for name, tensor in tensors.items():
        content = tensor.reshape(-1).view(torch.uint8).numpy().data
        if rows is None or name not in PAYLOADS:
            read_spans(file, [(starts[name], content)], source)
        elif len(rows):
            _read_rows(file, starts[name], content, rows, len(tensor), len(metadata.entries), source)
    return tensors


def _read_rows(
    file: io.FileIO, start: int, content: memoryview, rows: IntArray, layers: int, num_entries: int, source: str
) -> None:
    """Read the rows of a tensor [L, B, ...] that begins at `start`; adjacent rows at once."""
    row_bytes = content.nbytes // (layers * len(rows))
    runs = [(first, end, int(rows[first])) for first, end in runs_of(rows)]

    def spans() -> Iterator[Span]:
        for layer in range(layers):
            begin, there = layer * len(rows), start + layer * num_entries * row_bytes
            for first, end, row in runs:
                yield there + row * row_bytes, content[(begin + first) * row_bytes : (begin + end) * row_bytes]

    read_spans(file, spans(), source)


def _read_header(file: io.FileIO, size: int, source: str) -> tuple[dict[str, Any], int]:
    """Read the safetensors header as JSON, and its length; check sizes before parsing or allocating.

    Messages quote nothing of a file that is no bundle: the server answers with them.
    """
    if size == 0:
        raise BundleError(f"{source}: the file is empty")
    if size < 8:
        raise BundleError(f"{source}: truncated: {size} bytes are too few for a safetensors file")
    length = int.from_bytes(file.read(8), "little")
    if length > MAX_HEADER_BYTES:
        raise BundleError(
            f"{source}: the header is longer than {MAX_HEADER_BYTES} bytes, this is no safetensors file of a bundle"
        )
    if 8 + length > size:
        raise BundleError(f"{source}: truncated: the header is longer than the file, which has {size} bytes")
    try:
        header = from_json(file.read(length))
    except ValueError as error:
        raise BundleError(f"{source}: the header is not JSON, this is no safetensors file") from error
    if not isinstance(header, dict):
        raise BundleError(f"{source}: the header is not a JSON object, this is no safetensors file")
    rest()
    return header, length


def _parse_metadata(header: dict[str, Any], source: str) -> BundleMetadata:
    entry = header.get("__metadata__")
    text = entry.get(METADATA_KEY) if isinstance(entry, dict) else None
    if not isinstance(text, str):
        raise BundleError(f"{source}: no {METADATA_KEY!r} metadata: a safetensors file, but not a memory bundle")
    try:
        metadata = BundleMetadata.model_validate_json(text)
    except ValidationError as error:
        _require_version(text, source)
        raise BundleError(f"{source}: metadata: {first_problem(error)}") from error
    rest()
    check_metadata(metadata, source)
    rest()
    return metadata


def _require_version(text: str, source: str) -> None:
    """Refuse metadata of a format version that is not known, whatever else is wrong with it."""
    try:
        raw = from_json(text)
    except ValueError as error:
        raise BundleError(f"{source}: the {METADATA_KEY!r} metadata is not JSON") from error
    version = raw.get("format_version") if isinstance(raw, dict) else None
    if version not in FORMAT_VERSIONS:
        supported = ", ".join(map(str, FORMAT_VERSIONS))
        raise BundleError(f"{source}: format version {shown(version)} is not supported, expected one of {supported}")


def _parse_signature(header: dict[str, Any], source: str) -> Signature | None:
    """The signature, not yet checked; None without one."""
    if (text := header["__metadata__"].get(SIGNATURE_KEY)) is None:
        return None
    if not (isinstance(text, str) and len(text) <= MAX_SIGNATURE_LENGTH):
        raise BundleError(f"{source}: the signature is not a text of at most {MAX_SIGNATURE_LENGTH} characters")
    try:
        return Signature.model_validate_json(text)
    except ValidationError as error:
        raise BundleError(f"{source}: the signature: {first_problem(error)}") from error


def _check_layout(
    header: dict[str, Any], metadata: BundleMetadata, data_start: int, size: int, source: str
) -> dict[str, int]:
    """Check names, dtypes, shapes, places and the file's size from the header, before reading any tensor.

    Returns:
        The place of each tensor in the file.
    """
    shapes = expected_shapes(metadata)
    names = set(header) - {"__metadata__"}
    if missing := set(shapes) - names:
        raise BundleError(f"{source}: tensors are missing: {', '.join(sorted(missing))}")
    if unknown := names - set(shapes):
        raise BundleError(f"{source}: unknown tensors: {', '.join(sorted(unknown)):.200}")
    spans: dict[str, tuple[int, int]] = {}
    for name, shape in shapes.items():
        entry = header[name] if isinstance(header[name], dict) else {}
        dtype = _SAFETENSORS_DTYPES[DTYPES[name]]
        if (entry.get("dtype"), entry.get("shape")) != (dtype, list(shape)):
            named = entry.get("dtype")
            found = f"{f'{named:.20}' if isinstance(named, str) else shown(named)} {shown(entry.get('shape'))}"
            raise BundleError(f"{source}: {name} must be {dtype} {list(shape)}, found {found}")
        nbytes = math.prod(shape) * DTYPES[name].itemsize
        offsets = entry.get("data_offsets")
        if not (isinstance(offsets, list) and list(map(type, offsets)) == [int, int]):
            raise BundleError(f"{source}: {name}: data_offsets must be two whole numbers")
        spans[name] = offsets[0], nbytes
        if offsets[1] - offsets[0] != nbytes:
            raise BundleError(f"{source}: {name} must have {nbytes} bytes, found {offsets!r:.80}")
    end = 0
    for name, (start, nbytes) in sorted(spans.items(), key=lambda item: item[1]):
        if start != end:
            raise BundleError(f"{source}: {name} must begin at byte {end} of the tensors, found {start!r:.20}")
        end += nbytes
    if size != (expected := data_start + end):
        problem = "truncated" if size < expected else "trailing bytes"
        raise BundleError(f"{source}: {problem}: expected {expected} bytes, found {size}")
    return {name: data_start + start for name, (start, _) in spans.items()}
