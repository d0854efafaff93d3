"""The memory bundle: one safetensors file with the whole adaptation state of a task stream.

Shapes: B entries, m payload tokens, L layers, J KV heads, D head size, d hidden size, C tasks of a relevance gate.

A file holds the tensors of `Bundle` and one metadata entry, `inducekv`, the JSON of `BundleMetadata`. Format version 2
adds a relevance gate to version 1; a bundle without a gate is written as version 1. Reading never executes or unpickles
anything, and `read_bundle` checks all content before use.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import secrets
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, Final, Literal

import safetensors
import safetensors.torch
import torch
from pydantic import BaseModel, ConfigDict, Field, SerializerFunctionWrapHandler, ValidationError, model_serializer
from torch import Tensor

from .errors import BundleError, FingerprintMismatch
from .page_terms import Weighting

FORMAT_VERSION: Final = 1
GATED_FORMAT_VERSION: Final = 2
METADATA_KEY = "inducekv"
MAX_HEADER_BYTES = 16 * 2**20
# Rounding a unit vector to float16 changes its norm by at most 2^-11, plus a little for subnormal components.
UNIT_NORM_TOLERANCE = 2e-3

_DTYPES = {
    "retrieval_keys": torch.float16,
    "payload_keys": torch.float16,
    "payload_values": torch.float16,
    "temperature": torch.float32,
    "value_gates": torch.float32,
    "layer_bias": torch.float32,
    "gate_keys": torch.float16,
    "gate_thresholds": torch.float32,
}
_SAFETENSORS_DTYPES = {torch.float16: "F16", torch.float32: "F32"}


class EntryRecord(BaseModel):
    """The training example that an entry was made from."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: str = Field(min_length=1)
    task: str = Field(min_length=1)
    source_digest: str = Field(min_length=1)  # sha256 of the example's messages and image bytes


class BackboneFingerprint(BaseModel):
    """The properties that must match between the model a memory was extracted from and the model that serves it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    architecture: str
    num_layers: int = Field(ge=1)  # L
    num_kv_heads: int = Field(ge=1)  # J
    head_dim: int = Field(ge=1)  # D
    hidden_size: int = Field(ge=1)  # d
    rope: dict[str, Any]
    norm: dict[str, Any]
    tokenizer_digest: str

    def differences(self, other: BackboneFingerprint) -> list[str]:
        """List every field that differs as "field: own value, other value"."""
        return [
            f"{name}: {getattr(self, name)!r}, other {getattr(other, name)!r}"
            for name in type(self).model_fields
            if getattr(self, name) != getattr(other, name)
        ]


class BundleMetadata(BaseModel):
    """The part of a bundle that is not tensors."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format_version: Literal[1, 2] = FORMAT_VERSION  # 2 if and only if there is a relevance gate
    backbone: BackboneFingerprint
    budget: int = Field(ge=1)  # the maximum number of entries
    payload_tokens: int = Field(ge=1)  # m
    entries: tuple[EntryRecord, ...] = Field(min_length=1)  # [B]
    weighting: Weighting
    recipe: str  # the recipe that made the memory; "build" is extraction only
    settings: dict[str, Any]  # the recipe's settings, JSON values only
    adapter: str | None = None  # the LoRA adapter that the memory was made with and requires
    parent_digest: str | None = None  # the memory this one was made from
    gate_tasks: tuple[str, ...] = ()  # [C], the tasks of the relevance gate; empty without a gate
    digest: str = ""  # see `bundle_digest`

    @model_serializer(mode="wrap")
    def _as_version_1_without_a_gate(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Omit `gate_tasks` in version 1, so that its files and digests do not change."""
        fields: dict[str, Any] = serialize(self)
        if not self.gate_tasks:
            fields.pop("gate_tasks", None)
        return fields


@dataclass(frozen=True)
class Gate:
    """A relevance gate; `inducekv_vllm.gate` applies it. A request uses the memory if a task's margin is at least 0.

    margin_c = <q_prefix, keys[c, 0]> + <q_text, keys[c, 1]> - thresholds[c]
    """

    keys: Tensor  # [C, 2, d], any finite vectors; stored as float16
    thresholds: Tensor  # [C]; stored as float32
    tasks: tuple[str, ...]  # [C], unique, exactly the tasks of the entries


@dataclass(frozen=True)
class Bundle:
    """One memory. `Bundle.create` computes its digest, so the tensors must not change afterwards."""

    retrieval_keys: Tensor  # [B, d] float16, unit norm
    payload_keys: Tensor  # [L, B, J, m, D] float16, before RoPE
    payload_values: Tensor  # [L, B, J, m, D] float16
    temperature: Tensor  # [] float32, tau > 0
    value_gates: Tensor  # [L] float32, in (0, 1]
    layer_bias: Tensor  # [L] float32, added to every memory logit of the layer
    metadata: BundleMetadata
    gate_keys: Tensor | None = None  # [C, 2, d] float16, see `Gate`
    gate_thresholds: Tensor | None = None  # [C] float32

    @classmethod
    def create(
        cls,
        *,
        retrieval_keys: Tensor,
        payload_keys: Tensor,
        payload_values: Tensor,
        temperature: Tensor | float,
        value_gates: Tensor,
        layer_bias: Tensor,
        backbone: BackboneFingerprint,
        budget: int,
        entries: tuple[EntryRecord, ...],
        weighting: Weighting,
        recipe: str,
        settings: dict[str, Any],
        adapter: str | None = None,
        parent_digest: str | None = None,
        gate: Gate | None = None,
    ) -> Bundle:
        """Create a bundle: round the tensors (shapes as in `Bundle`, any float type), check them, compute the digest.

        Raises:
            BundleError: the parts are inconsistent or out of range (see `check_bundle`).
        """
        try:
            settings = json.loads(json.dumps(settings, allow_nan=False))
        except (TypeError, ValueError) as error:
            raise BundleError(f"bundle settings must be JSON values: {error}") from error
        try:
            metadata = BundleMetadata(
                format_version=FORMAT_VERSION if gate is None else GATED_FORMAT_VERSION,
                backbone=backbone,
                budget=budget,
                payload_tokens=payload_keys.shape[3] if payload_keys.ndim == 5 else 0,
                entries=entries,
                weighting=weighting,
                recipe=recipe,
                settings=settings,
                adapter=adapter,
                parent_digest=parent_digest,
                gate_tasks=() if gate is None else gate.tasks,
            )
        except ValidationError as error:
            raise BundleError(f"bundle metadata: {_first_problem(error)}") from error
        tensors = {
            "retrieval_keys": retrieval_keys,
            "payload_keys": payload_keys,
            "payload_values": payload_values,
            "temperature": torch.as_tensor(temperature),
            "value_gates": value_gates,
            "layer_bias": layer_bias,
        }
        if gate is not None:
            tensors |= {"gate_keys": gate.keys, "gate_thresholds": gate.thresholds}
        stored = {name: t.detach().to("cpu", _DTYPES[name]).clone().contiguous() for name, t in tensors.items()}
        bundle = cls(**stored, metadata=metadata)
        bundle = replace(bundle, metadata=metadata.model_copy(update={"digest": bundle_digest(bundle)}))
        check_bundle(bundle, "bundle")
        return bundle

    @property
    def num_entries(self) -> int:
        return self.retrieval_keys.shape[0]

    @property
    def num_layers(self) -> int:
        return self.payload_keys.shape[0]

    @property
    def payload_tokens(self) -> int:
        return self.payload_keys.shape[3]

    @property
    def digest(self) -> str:
        return self.metadata.digest

    @property
    def gate(self) -> Gate | None:
        """The relevance gate with its stored tensors, or None for a memory that is always used."""
        if self.gate_keys is None or self.gate_thresholds is None:
            return None
        return Gate(self.gate_keys, self.gate_thresholds, self.metadata.gate_tasks)

    def tensors(self) -> dict[str, Tensor]:
        """The stored tensors by their names in the file; includes those of the gate if there is one."""
        return {name: tensor for name in _DTYPES if (tensor := getattr(self, name)) is not None}

    def require_backbone(self, served: BackboneFingerprint, name: str = "bundle") -> None:
        """Refuse to be used with another model.

        Raises:
            FingerprintMismatch: listing every difference.
        """
        if differences := self.metadata.backbone.differences(served):
            raise FingerprintMismatch(f"{name} was made for another backbone: " + "; ".join(differences))


def bundle_digest(bundle: Bundle) -> str:
    """sha256 over every tensor (name, dtype, shape, bytes) and all metadata but the digest itself.

    Two bundles that behave differently never share a digest, and no byte of the metadata can change unnoticed.
    """
    sha = hashlib.sha256()
    metadata = bundle.metadata.model_dump(mode="json", exclude={"digest"})
    sha.update(json.dumps(metadata, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode())
    for name, tensor in sorted(bundle.tensors().items()):
        sha.update(f"\n{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        sha.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return sha.hexdigest()


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
    _check_structure(bundle, str(source))
    if verify:
        _check_values(bundle, str(source))
    return bundle


def expected_shapes(metadata: BundleMetadata) -> dict[str, tuple[int, ...]]:
    """Return the shape that each tensor must have according to the metadata."""
    backbone, B, m = metadata.backbone, len(metadata.entries), metadata.payload_tokens
    payload = (backbone.num_layers, B, backbone.num_kv_heads, m, backbone.head_dim)
    C = len(metadata.gate_tasks)
    gate = {"gate_keys": (C, 2, backbone.hidden_size), "gate_thresholds": (C,)}
    return {
        "retrieval_keys": (B, backbone.hidden_size),
        "payload_keys": payload,
        "payload_values": payload,
        "temperature": (),
        "value_gates": (backbone.num_layers,),
        "layer_bias": (backbone.num_layers,),
        **(gate if C else {}),
    }


def check_bundle(bundle: Bundle, name: str) -> None:
    """Check that a bundle is valid; error messages begin with `name`.

    Raises:
        BundleError: names the first problem.
    """
    _check_structure(bundle, name)
    _check_values(bundle, name)


def _check_structure(bundle: Bundle, name: str) -> None:
    _check_entries(bundle.metadata, name)
    _check_gate_tasks(bundle.metadata, name)
    shapes, tensors = expected_shapes(bundle.metadata), bundle.tensors()
    if set(tensors) != set(shapes):
        raise BundleError(f"{name}: a relevance gate needs keys, thresholds and at least one task, or none of them")
    for tensor_name, shape in shapes.items():
        tensor = tensors[tensor_name]
        if tuple(tensor.shape) != shape or tensor.dtype != _DTYPES[tensor_name]:
            raise BundleError(
                f"{name}: {tensor_name} must be {_DTYPES[tensor_name]} {list(shape)}, "
                f"found {tensor.dtype} {list(tensor.shape)}"
            )


def _check_values(bundle: Bundle, name: str) -> None:
    for tensor_name, tensor in bundle.tensors().items():
        # NaN propagates into the extremes, so this equals isfinite(tensor).all() but is about 25 times as fast.
        if not torch.stack(torch.aminmax(tensor)).isfinite().all():
            raise BundleError(f"{name}: {tensor_name} contains NaN or infinite values")
    norms = bundle.retrieval_keys.float().norm(dim=1)  # [B]
    worst = int((norms - 1).abs().argmax())
    if abs(float(norms[worst]) - 1) > UNIT_NORM_TOLERANCE:
        raise BundleError(f"{name}: retrieval key {worst} must have norm 1, found {float(norms[worst]):.6g}")
    if not bundle.temperature > 0:
        raise BundleError(f"{name}: temperature must be above 0, found {float(bundle.temperature):.6g}")
    if not bool(((bundle.value_gates > 0) & (bundle.value_gates <= 1)).all()):
        raise BundleError(f"{name}: value_gates must be above 0 and at most 1")
    if bundle_digest(bundle) != bundle.digest:
        raise BundleError(f"{name}: the content does not match its digest: the file is damaged or was altered")


def _check_entries(metadata: BundleMetadata, name: str) -> None:
    if len(metadata.entries) > metadata.budget:
        raise BundleError(f"{name}: {len(metadata.entries)} entries exceed the budget of {metadata.budget}")
    if (twice := _duplicate([entry.id for entry in metadata.entries])) is not None:
        raise BundleError(f"{name}: entry id {twice!r} occurs more than once")


def _duplicate(names: Sequence[str]) -> str | None:
    return next((name for name, count in Counter(names).items() if count > 1), None)


def _check_gate_tasks(metadata: BundleMetadata, name: str) -> None:
    tasks = metadata.gate_tasks
    if (metadata.format_version == GATED_FORMAT_VERSION) != bool(tasks):
        raise BundleError(
            f"{name}: format version {GATED_FORMAT_VERSION} is the one with a relevance gate: "
            f"found version {metadata.format_version} with {len(tasks)} gate_tasks"
        )
    if not tasks:
        return
    if (twice := _duplicate(tasks)) is not None:
        raise BundleError(f"{name}: gate task {twice!r} occurs more than once")
    if stray := next((entry for entry in metadata.entries if entry.task not in tasks), None):
        raise BundleError(
            f"{name}: entry {stray.id!r} belongs to the task {stray.task!r}, which the gate does not have"
        )
    if empty := set(tasks) - {entry.task for entry in metadata.entries}:
        raise BundleError(f"{name}: gate task {min(empty)!r} has no entries")
    if metadata.weighting != "prior":
        # Entries of other tasks must be absent; in "sqrt" weighting an entry of alpha = 0 still takes its share.
        raise BundleError(f'{name}: a relevance gate needs the weighting "prior", found {metadata.weighting!r}')


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
    if version not in (FORMAT_VERSION, GATED_FORMAT_VERSION):
        supported = f"{FORMAT_VERSION} or {GATED_FORMAT_VERSION}"
        raise BundleError(f"{source}: format version {version!r} is not supported, expected {supported}")
    try:
        metadata = BundleMetadata.model_validate_json(text)
    except ValidationError as error:
        raise BundleError(f"{source}: metadata: {_first_problem(error)}") from error
    _check_entries(metadata, str(source))
    _check_gate_tasks(metadata, str(source))
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
        dtype = _SAFETENSORS_DTYPES[_DTYPES[name]]
        if (entry.get("dtype"), entry.get("shape")) != (dtype, list(shape)):
            raise BundleError(
                f"{source}: {name} must be {dtype} {list(shape)}, found {entry.get('dtype')} {entry.get('shape')}"
            )
        tensor_bytes += math.prod(shape) * _DTYPES[name].itemsize
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


def _first_problem(error: ValidationError) -> str:
    problem = error.errors()[0]
    place = ".".join(str(part) for part in problem["loc"])
    return f"{place or 'metadata'}: {problem['msg']}"
