"""Mutations of bundles of every format version: of their bytes, of the header's JSON, of the tensors."""

from __future__ import annotations

import base64
import copy
import hashlib
import json
import os
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import strategies as st

from inducekv_vllm.bundle import (
    MAX_HEADER_BYTES,
    METADATA_KEY,
    AdapterRecord,
    Bundle,
    EntryRecord,
    Gate,
    sign_digest,
    write_bundle,
)
from inducekv_vllm.bundle.signature import SIGNATURE_KEY
from inducekv_vllm.bundle.tensors import PAYLOADS
from tests.inducekv_vllm.bundles import (
    D,
    G,
    J,
    L,
    d,
    older,
    random_bundle,
    random_gate,
    random_gated_bundle,
    random_maps,
)
from tests.mutation.json_damage import Raw, bombs, edit, text_of
from tests.mutation.reading import tensors_digest

Tensors = dict[str, tuple[str, list[int], bytes]]
DTYPES = ("F16", "F32", "F64", "BF16", "I8", "U8", "I64", "BOOL", "F8_E4M3", "C64", "f16", "", "FLOAT16")
# Bits of a float16, and of half a float32: NaN, infinities, denormals, zeros, the largest, and one.
WORDS = (0x7E00, 0xFE01, 0x7C00, 0xFC00, 0x0001, 0x83FF, 0x0000, 0x8000, 0x7BFF, 0xFBFF, 0x3C00, 0x7F80, 0xFF80, 0xFFFF)
BOMB_BYTES = MAX_HEADER_BYTES - 2**16
MAX_BYTES = 128 * 2**20  # what a server is told to take at most, where a file is as large as its header says


@dataclass(frozen=True)
class Held:
    """What a bundle holds, by its digest."""

    digest: str
    tensors: Tensors
    claimed: tuple[str, ...] = ()  # [B], the payload digests in the metadata

    def read(self, known: Container[str]) -> dict[str, Any] | None:
        """What comes of reading it without the payloads of these digests; None if it must be refused."""
        rows = [row for row, digest in enumerate(self.claimed) if digest not in known]
        covered = [name for name in PAYLOADS if name in self.tensors] if self.claimed else []
        actual = payload_digests([self.tensors[name] for name in covered]) if covered else []
        if any(self.claimed[row] != actual[row] for row in rows):
            return None
        is_whole = len(rows) == len(self.claimed)
        tensors = self.tensors if is_whole else self.tensors | {n: rows_of(self.tensors[n], rows) for n in covered}
        return {"digest": self.digest, "rows": None if is_whole else rows, "tensors": tensors_digest(tensors)}


@dataclass(frozen=True)
class BundleFile:
    """A bundle file in its parts; none of them has to be right."""

    header: Any  # JSON values; the metadata's texts are at header["__metadata__"]
    body: bytes
    held: Held  # what a reader must find in it, if anything

    @property
    def metadata(self) -> Any:
        return json.loads(self.header["__metadata__"][METADATA_KEY])

    def with_metadata(self, metadata: Any) -> BundleFile:
        texts = {**self.header["__metadata__"], METADATA_KEY: text_of(metadata)}
        return replace(self, header={**self.header, "__metadata__": texts})

    def content(self) -> bytes:
        text = text_of(self.header).encode("utf-8", "surrogatepass")
        return len(text).to_bytes(8, "little") + text + self.body


@dataclass(frozen=True, repr=False)
class Mutated:
    """A file, and the only bundle that may come of it."""

    content: bytes
    held: Held
    size: int | None = None  # of a sparse file; None: the content's
    max_bytes: int | None = None
    known: frozenset[str] = frozenset()  # payload digests of which a second reader has the payloads

    def __repr__(self) -> str:
        limits = f"size={self.size}, max_bytes={self.max_bytes}, known={sorted(self.known)}"
        return f"Mutated({self.content!r:.3000}, {limits})"

    def write(self, path: Path) -> None:
        path.write_bytes(self.content)
        if self.size is not None:
            os.truncate(path, self.size)


# ------------------------------------------------------------------------------------------------- what is mutated


@cache
def bundle_files() -> Mapping[str, BundleFile]:
    """Small bundles of every format version and of what a bundle may hold."""
    with TemporaryDirectory() as folder:
        return {name: _written(bundle, Path(folder) / name) for name, bundle in (*_older(), *_bundles())}


def _older() -> Iterator[tuple[str, Bundle]]:
    """As they were written before format version 6."""
    for name, bundle in _bundles():
        if bundle.num_entries:
            was = older(bundle)
            yield f"{was.metadata.format_version} {name}", _signed(was) if bundle.signature else was


def _bundles() -> Iterator[tuple[str, Bundle]]:
    few: dict[str, Any] = {"payload_tokens": 1}
    decoupled: dict[str, Any] = {"form": "decoupled", "weighting": "uniform", "activations": {"t": "text"}}
    maps = random_maps((L, 5, J, 1, D), 2, G)
    made, gone = datetime(2026, 1, 2, tzinfo=UTC), datetime(2027, 1, 2, 3, 4, 5, tzinfo=UTC)
    dated = tuple(EntryRecord(id=f"é{i}", task="t", source_digest="ab", created_at=made) for i in range(4))
    dated += (EntryRecord(id="last", task="t", source_digest="ab", expires_at=gone),)
    gate = random_gate(tasks=("t", "u"), seed=1)
    adapter = AdapterRecord(task="u", path="adapters/u", digest="c" * 64, rank=2)

    yield "merged", random_bundle(**few)
    yield "merged, prior, with an adapter", random_bundle(**few, weighting="prior", adapter="lora-a")
    yield "gated", random_gated_bundle(**few, parent_digest="f" * 64)
    yield "decoupled", random_bundle(**few, **decoupled)
    yield "decoupled and routed", random_bundle(**few, **decoupled, gate=gate, task_adapters=(adapter,))
    yield "routed", _routed(gate, adapter)
    yield "mapped", random_bundle(**few, **decoupled, **maps)
    yield "merged, dated", random_bundle(**few, entries=dated)
    mapped = random_bundle(**few, **decoupled, **maps, entries=dated, settings={"grid": [0.1, {"a": None}], "é": "🙂"})
    yield "mapped, dated, signed", _signed(mapped)


def _signed(bundle: Bundle) -> Bundle:
    return replace(bundle, signature=sign_digest(bundle.digest, Ed25519PrivateKey.from_private_bytes(bytes(32))))


def _routed(gate: Gate, adapter: AdapterRecord) -> Bundle:
    """Without entries."""
    none = torch.zeros(L, 0, J, 1, D)
    records = (adapter, replace_record(adapter, task="t", digest="d" * 64))
    return random_bundle(
        retrieval_keys=torch.zeros(0, d),
        payload_keys=none,
        payload_values=none,
        entries=(),
        budget=1,
        weighting="uniform",
        form="decoupled",
        gate=gate,
        task_adapters=records,
    )


def replace_record(record: AdapterRecord, **changes: Any) -> AdapterRecord:
    return record.model_copy(update=changes)


def _written(bundle: Bundle, path: Path) -> BundleFile:
    write_bundle(bundle, path)
    content = path.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    header, body = json.loads(content[8:start]), content[start:]
    held = Held(bundle.digest, tensors_of(header, body), bundle.metadata.payload_digests)
    file = BundleFile(header, body, held)
    assert resealed(file) == file, "the digest of this test is not the one of bundles"
    return file


# ------------------------------------------------------------------------------------------------- seals


def tensors_of(header: Mapping[str, Any], body: bytes) -> Tensors:
    entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
    return {name: (e["dtype"], e["shape"], body[slice(*e["data_offsets"])]) for name, e in entries.items()}


def payload_digests(parts: Sequence[tuple[str, list[int], bytes]]) -> list[str]:
    """For each entry the digest of its part of each of these tensors, as docs/bundle-format.md describes it."""
    (num_layers, num_entries), digests = parts[0][1][:2], []
    for row in range(num_entries):
        sha = hashlib.sha256("".join(f"{[shape[0], *shape[2:]]}\n" for _, shape, _ in parts).encode())
        for _, _, content in parts:
            size = len(content) // (num_layers * num_entries)
            for layer in range(num_layers):
                start = (layer * num_entries + row) * size
                sha.update(content[start : start + size])
        digests.append(sha.hexdigest())
    return digests


def rows_of(tensor: tuple[str, list[int], bytes], rows: Sequence[int]) -> tuple[str, list[int], bytes]:
    """Some rows of a tensor [L, B, ...]."""
    dtype, (num_layers, num_entries, *rest), content = tensor
    size = len(content) // (num_layers * num_entries)
    starts = [(layer * num_entries + row) * size for layer in range(num_layers) for row in rows]
    return dtype, [num_layers, len(rows), *rest], b"".join(content[start : start + size] for start in starts)


def resealed(file: BundleFile, payloads: bool = True) -> BundleFile:
    """The file with the digest of what it holds now, as docs/bundle-format.md describes it.

    Unchanged if it cannot have one: the metadata is no JSON object with a digest, or a tensor no part of the file.

    Args:
        payloads: with the payload digests too; otherwise the metadata keeps those that it has.
    """
    try:
        text = file.header["__metadata__"][METADATA_KEY]
        metadata = json.loads(text)
        tensors = tensors_of(file.header, file.body)
        covered: tuple[str, ...] = ()
        if metadata.get("payload_digests"):
            covered = tuple(name for name in PAYLOADS if name in tensors)
            if payloads:
                now = payload_digests([tensors[name] for name in covered])
                for was, digest in zip(metadata["payload_digests"], now, strict=True):
                    text = text.replace(json.dumps(was), json.dumps(digest), 1)
                metadata = json.loads(text)
        before = json.dumps(metadata.pop("digest"))
        names = {"F16": "torch.float16", "F32": "torch.float32"}
        sha = hashlib.sha256(json.dumps(metadata, sort_keys=True, separators=(",", ":")).encode())
        for name, (dtype, shape, content) in sorted(tensors.items()):
            if name not in covered:
                sha.update(f"\n{name} {names[dtype]} {shape}\n".encode() + content)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, ZeroDivisionError):
        return file
    if text.count(before) != 1:
        return file
    texts = {**file.header["__metadata__"], METADATA_KEY: text.replace(before, json.dumps(sha.hexdigest()))}
    header = {**file.header, "__metadata__": texts}
    return BundleFile(header, file.body, Held(sha.hexdigest(), tensors, tuple(metadata.get("payload_digests", ()))))


# ------------------------------------------------------------------------------------------------- mutations


@st.composite
def mutated_bundles(draw: st.DrawFn) -> Mutated:
    """One bundle with one to three mutations of one kind."""
    files = bundle_files()
    file = files[draw(st.sampled_from(sorted(files)))]
    kind = draw(st.sampled_from(KINDS))
    return replace(kind(draw, file), known=_known(draw, file))


def _known(draw: st.DrawFn, file: BundleFile) -> frozenset[str]:
    """What a server may have of a file that was not damaged yet."""
    if not (digests := sorted(set(file.held.claimed))):
        return frozenset()
    return draw(st.just(frozenset(digests)) | st.frozensets(st.sampled_from(digests)))


def _as_it_is(file: BundleFile, content: bytes | None = None, **changes: Any) -> Mutated:
    return Mutated(file.content() if content is None else content, file.held, **changes)


def _bits(draw: st.DrawFn, file: BundleFile) -> Mutated:
    content = bytearray(file.content())
    end = draw(st.sampled_from((8, 8 + int.from_bytes(content[:8], "little"), len(content))))
    for _ in range(draw(st.integers(1, 4))):
        content[draw(st.integers(0, end - 1))] ^= 1 << draw(st.integers(0, 7))
    return _as_it_is(file, bytes(content))


def _cut(draw: st.DrawFn, file: BundleFile) -> Mutated:
    content = file.content()
    return _as_it_is(file, content[: draw(st.integers(0, len(content) - 1))])


def _appended(draw: st.DrawFn, file: BundleFile) -> Mutated:
    garbage = draw(st.binary(min_size=1, max_size=64) | st.just(file.content()) | st.just(b"\0" * 4096))
    return _as_it_is(file, file.content() + garbage)


def _spliced(draw: st.DrawFn, file: BundleFile) -> Mutated:
    """Bytes replaced, inserted, removed, repeated, or taken from another bundle."""
    content = file.content()
    start = draw(st.integers(0, len(content)))
    end = min(len(content), start + draw(st.integers(0, 200)))
    other = bundle_files()[draw(st.sampled_from(sorted(bundle_files())))].content()
    middle = draw(
        st.sampled_from((b"", content[start:end] * 2, other[start:end], other[start:])) | st.binary(max_size=99)
    )
    return _as_it_is(file, content[:start] + middle + content[end:])


def _length(draw: st.DrawFn, file: BundleFile) -> Mutated:
    """The length of the header is another one."""
    content = file.content()
    right = int.from_bytes(content[:8], "little")
    wrong = draw(st.sampled_from((0, 1, right - 1, right + 1, right + 8, len(content), 2**24, 2**63, 2**64 - 1)))
    return _as_it_is(file, wrong.to_bytes(8, "little") + content[8:])


def _encoded(draw: st.DrawFn, file: BundleFile) -> Mutated:
    """The header in other bytes of the same meaning, or nearly."""
    text = draw(st.sampled_from((text_of(file.header), json.dumps(file.header, ensure_ascii=False, indent=1))))
    text = draw(st.sampled_from(("", " ", "\ufeff", "\0", "//\n"))) + text
    text += draw(st.sampled_from(("", " ", "\n\n", "\0", "{}", "x")))
    content = text.encode(draw(st.sampled_from(("utf-8", "utf-16", "utf-16-le", "utf-32", "utf-7"))))
    return _as_it_is(file, len(content).to_bytes(8, "little") + content + file.body)


def _header(draw: st.DrawFn, file: BundleFile) -> Mutated:
    header = file.header
    for _ in range(draw(st.integers(1, 3))):
        header = edit(draw, header)
    return _as_it_is(replace(file, header=header))


def _metadata(draw: st.DrawFn, file: BundleFile) -> Mutated:
    metadata = file.metadata
    for _ in range(draw(st.integers(1, 3))):
        metadata = edit(draw, metadata)
    file = file.with_metadata(metadata)
    return _as_it_is(resealed(file) if draw(st.booleans()) else file)


def _claims(draw: st.DrawFn, file: BundleFile) -> Mutated:
    """The payload digests are others, and the digest right for them."""
    if not file.held.claimed:
        return _metadata(draw, file)
    metadata, everywhere = file.metadata, [d for each in bundle_files().values() for d in each.held.claimed]
    digests = metadata["payload_digests"]
    if draw(st.booleans()):
        metadata["payload_digests"] = draw(st.permutations(digests))
    else:
        for _ in range(draw(st.integers(1, len(digests)))):
            other = draw(st.sampled_from((*everywhere, "0" * 64)))
            digests[draw(st.integers(0, len(digests) - 1))] = other
    return _as_it_is(resealed(file.with_metadata(metadata), payloads=False))


def _signature(draw: st.DrawFn, file: BundleFile) -> Mutated:
    right = {"algorithm": "ed25519", "key": "0" * 64, "value": base64.b64encode(bytes(64)).decode()}
    texts = {**file.header["__metadata__"], SIGNATURE_KEY: text_of(edit(draw, right))}
    return _as_it_is(
        replace(file, header={**file.header, "__metadata__": edit(draw, texts) if draw(st.booleans()) else texts})
    )


def _places(draw: st.DrawFn, file: BundleFile) -> Mutated:
    """Tensors of other types, shapes or places: overlapping, exchanged, beyond the file."""
    header = copy.deepcopy(file.header)
    names = sorted(header.keys() - {"__metadata__"})
    for _ in range(draw(st.integers(1, 2))):
        name = draw(st.sampled_from(names))
        entry, other = header[name], header[draw(st.sampled_from(names))]
        shape, (begin, end) = file.header[name]["shape"], file.header[name]["data_offsets"]
        match draw(st.sampled_from(("dtype", "shape", "exchange", "same", "shift", "grow", "float", "huge"))):
            case "dtype":
                entry["dtype"] = draw(st.sampled_from(DTYPES))
            case "shape":
                sizes = st.sampled_from((-1, 0, 1, 2, 3, 2**31, 2**63, 10**30, 1.0, True, "3", None))
                entry["shape"] = draw(st.lists(sizes, max_size=6) | st.permutations(shape))
            case "exchange":
                entry["data_offsets"], other["data_offsets"] = other["data_offsets"], entry["data_offsets"]
            case "same":
                entry["data_offsets"] = other["data_offsets"]
            case "shift":
                by = draw(st.sampled_from((-4, -1, 1, 2, 8, -begin, 2**40)))
                entry["data_offsets"] = [begin + by, end + by]
            case "grow":
                entry["data_offsets"] = [begin, end + draw(st.sampled_from((-2, 2, -end, 2**62)))]
            case "float":
                entry["data_offsets"] = [float(begin), float(end)]
            case "huge":
                entry["data_offsets"] = [begin, Raw("9" * draw(st.integers(1, 5000)))]
    return _as_it_is(replace(file, header=header))


def _values(draw: st.DrawFn, file: BundleFile) -> Mutated:
    """Numbers in tensors: NaN, infinities, denormals, zeros; with the digest of before, or the right one."""
    body = bytearray(file.body)
    entry = file.header[draw(st.sampled_from(sorted(file.header.keys() - {"__metadata__"})))]
    begin, end = entry["data_offsets"]
    for _ in range(draw(st.integers(1, 4)) if end > begin else 0):
        word = draw(st.sampled_from(WORDS)).to_bytes(2, "little")
        place = begin + 2 * draw(st.integers(0, (end - begin) // 2 - 1))
        body[place : place + 2] = word
        if draw(st.booleans()):  # everywhere
            body[begin:end] = word * ((end - begin) // 2)
    file = replace(file, body=bytes(body))
    return _as_it_is(resealed(file) if draw(st.booleans()) else file)


def _sections(draw: st.DrawFn, file: BundleFile) -> Mutated:
    """The tensors in another order, with their places or without; or the header behind them."""
    if draw(st.integers(0, 9)) == 0:
        content = file.content()
        start = 8 + int.from_bytes(content[:8], "little")
        return _as_it_is(file, content[:8] + content[start:] + content[8:start])
    header, body = copy.deepcopy(file.header), b""
    keep_places = draw(st.booleans())
    for name in draw(st.permutations(sorted(header.keys() - {"__metadata__"}))):
        part = file.body[slice(*file.header[name]["data_offsets"])]
        if not keep_places:
            header[name]["data_offsets"] = [len(body), len(body) + len(part)]
        body += part
    return _as_it_is(replace(file, header=header, body=body))


def _sparse(draw: st.DrawFn, file: BundleFile) -> Mutated:
    """Files of up to 8 TB that take no room on the disk."""
    content, size = file.content(), draw(st.sampled_from((10**6, 2**31, 2**32 + 1, 10**10, 8 * 10**12)))
    match draw(st.sampled_from(("longer", "header", "all", "empty"))):
        case "longer":
            return _as_it_is(file, content, size=max(size, len(content)))
        case "header":
            length = draw(st.sampled_from((2**16, 2**24, 2**24 + 1, size - 8)))
            return _as_it_is(file, length.to_bytes(8, "little") + content[8:], size=max(size, len(content)))
        case "empty":
            return _as_it_is(file, b"", size=size)
    return _as_large_as_it_says(draw, file)


def _as_large_as_it_says(draw: st.DrawFn, file: BundleFile) -> Mutated:
    """Of more payload tokens, so that the header is right for a huge file; a limit must stop it."""
    metadata, header = file.metadata, copy.deepcopy(file.header)
    tokens = draw(st.sampled_from((10**5, 10**6, 10**9, 2**31 - 1)))
    metadata["payload_tokens"] = tokens
    end = 0
    for name in sorted(header.keys() - {"__metadata__"}):
        entry = header[name]
        begin, before = entry["data_offsets"]
        nbytes = before - begin
        if name in ("payload_keys", "payload_values"):
            entry["shape"][3], nbytes = tokens, nbytes * tokens
        entry["data_offsets"] = [end, end := end + nbytes]
    huge = replace(file, header=header).with_metadata(metadata)
    start = len(huge.content()) - len(huge.body)
    return _as_it_is(huge, size=min(start + end, 8 * 10**12), max_bytes=MAX_BYTES)


def bomb(draw: st.DrawFn) -> Mutated:
    """Much to parse: in the header, in the metadata, in the signature."""
    place = draw(st.sampled_from(("tensor", "settings", "rope", "entries", "gate_tasks", "signature")))
    much = draw(bombs(BOMB_BYTES))
    file = bundle_files()[draw(st.sampled_from(sorted(bundle_files())))]
    if place == "tensor":
        return _as_it_is(replace(file, header={**file.header, draw(st.sampled_from(("x", "layer_bias"))): much}))
    if place == "signature":
        texts = {**file.header["__metadata__"], SIGNATURE_KEY: '{"key":' + much + "}"}
        return _as_it_is(replace(file, header={**file.header, "__metadata__": texts}))
    metadata = file.metadata
    if place == "rope":
        metadata["backbone"]["rope"] = {"a": much}
    else:
        metadata[place] = {"a": much} if place == "settings" else much
    return _as_it_is(file.with_metadata(metadata))


KINDS = (
    *(_bits, _cut, _spliced, _appended, _length, _encoded, _sections, _sparse),
    *(_header, _header, _metadata, _metadata, _metadata, _claims, _signature, _places, _places, _values, _values),
)
