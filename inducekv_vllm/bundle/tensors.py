"""A bundle's tensors, their digest and their checks.

Shapes: B entries, m payload tokens, L layers that entries have payloads for, J KV heads, G query heads of a KV head, D
head size, V size of a head's values, which is D but for latents (MLA), d hidden size, r rank of a map. Of a relevance
gate: C tasks, S layers, P prototypes of a layer, F = J V, N buckets of words, K tasks that its classifiers were fitted
to, E tokens that end a clause, H = S P + 2 K.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Self

import torch
from pydantic import ValidationError
from torch import Tensor

from ..errors import BundleError, FingerprintMismatch
from ..gate import BUCKETS, MeanScores, RelevanceGate, TokenScores, TurnMarks, WordScores
from ..pace import rest
from .metadata import (
    FORMAT_VERSION,
    BackboneFingerprint,
    BundleMetadata,
    EntryRecord,
    FactRecord,
    GateRecord,
    OutputMap,
    check_metadata,
    first_problem,
)
from .signature import Signature

# Rounding a unit vector to float16 changes its norm by at most 2^-11, plus a little for subnormal components.
UNIT_NORM_TOLERANCE = 2e-3
AT_ONCE = 2**19  # values that are checked or hashed

_GATE = {  # by the names of `Gate`; files have the prefix
    "center": torch.float32,
    "scale": torch.float32,
    "prototypes": torch.float16,
    "floors": torch.float32,
    "weights": torch.float32,
    "thresholds": torch.float32,
}
_CLASSIFIERS = {  # of a gate that has any
    "directions": torch.float32,
    "rarity": torch.float32,
    "words": torch.float16,
    "offsets": torch.float32,
    "clause_ends": torch.int32,
}
_PREFIX = "gate_"
DTYPES = {
    "retrieval_keys": torch.float16,
    "payload_keys": torch.float16,
    "payload_values": torch.float16,
    "temperature": torch.float32,
    "value_gates": torch.float32,
    "layer_bias": torch.float32,
    **{f"{_PREFIX}{name}": dtype for name, dtype in (_GATE | _CLASSIFIERS).items()},
    "map_in": torch.float16,
    "map_out": torch.float16,
}
PAYLOADS = ("payload_keys", "payload_values")
# The tensors that have something of each entry, and which of their dimensions are the entries.
ENTRY_AXES = MappingProxyType({"retrieval_keys": 0, "payload_keys": 1, "payload_values": 1, "map_in": 1, "map_out": 1})


@dataclass(frozen=True)
class Gate:
    """A relevance gate as it is stored; `inducekv_vllm.gate` applies it."""

    layers: tuple[int, ...]  # [S], ascending
    marks: TurnMarks
    center: Tensor  # [S, F]; stored as float32
    scale: Tensor  # [S, F], above 0; stored as float32
    prototypes: Tensor  # [S, P, F], each of norm 1; stored as float16
    floors: Tensor  # [S, P], at least 0, below 1; stored as float32
    weights: Tensor  # [C, H]; stored as float32
    thresholds: Tensor  # [C], above 0; stored as float32
    tasks: tuple[str, ...]  # [C], unique; each has entries, facts or an adapter, and all tasks of entries are there
    near: tuple[float, ...] | None = None  # [C], at most 0: from which margin on a task's facts count; None for 0

    # Classifiers of means of a question's values and of its words; all of them or none.
    directions: Tensor | None = None  # [K, S, F]; stored as float32
    rarity: Tensor | None = None  # [N], above 0; stored as float32
    words: Tensor | None = None  # [K, N]; stored as float16
    offsets: Tensor | None = None  # [2, K], of the means and of the words; stored as float32
    clause_ends: Tensor | None = None  # [E], the ids of the tokens with which a clause ends; stored as int32

    @property
    def classified(self) -> int:
        """K."""
        return 0 if self.directions is None else len(self.directions)

    @property
    def mean_scores(self) -> MeanScores | None:
        if self.directions is None or self.offsets is None or self.clause_ends is None:
            return None
        return MeanScores(
            self.center, self.scale, self.directions, self.offsets[0], frozenset(self.clause_ends.tolist())
        )

    @property
    def word_scores(self) -> WordScores | None:
        if self.words is None or self.rarity is None or self.offsets is None:
            return None
        return WordScores(self.rarity.numpy(), self.words.float().numpy(), self.offsets[1].numpy())

    @property
    def token_scores(self) -> TokenScores:
        """In float32."""
        return TokenScores(self.center, self.scale, self.prototypes.float(), self.floors)

    @property
    def rule(self) -> RelevanceGate:
        return RelevanceGate(self.weights.numpy(), self.thresholds.numpy(), self.tasks, self.near)

    @property
    def record(self) -> GateRecord:
        prototypes = self.prototypes.shape[1] if self.prototypes.ndim == 3 else 0
        return GateRecord(
            layers=self.layers,
            prototypes=prototypes,
            classified=self.classified,
            clause_ends=0 if self.clause_ends is None else len(self.clause_ends),
            turn_begin=self.marks.begin,
            turn_end=self.marks.end,
            near=self.near,
        )

    def tensors(self) -> dict[str, Tensor]:
        """By their names in the file."""
        return {f"{_PREFIX}{name}": getattr(self, name) for name in (*_GATE, *self._classifiers)}

    @property
    def _classifiers(self) -> tuple[str, ...]:
        """The tensors of its classifiers that are there."""
        return tuple(name for name in _CLASSIFIERS if getattr(self, name) is not None)

    @classmethod
    def of_file(cls, record: GateRecord, tasks: tuple[str, ...], tensors: Mapping[str, Tensor]) -> Self:
        """`tensors` by their names in the file, others among them."""
        names = (*_GATE, *_CLASSIFIERS) if record.classified else tuple(_GATE)
        stored = {name: tensors[f"{_PREFIX}{name}"] for name in names}
        marks = TurnMarks(record.turn_begin, record.turn_end)
        return cls(layers=record.layers, marks=marks, tasks=tasks, near=record.near, **stored)

    def stored(self) -> Self:
        """Copies on the CPU in the types of a file."""
        dtypes = _GATE | {name: _CLASSIFIERS[name] for name in self._classifiers}
        tensors: dict[str, Any] = {name: _stored(getattr(self, name), dtype) for name, dtype in dtypes.items()}
        return replace(self, **tensors)

    def take(self, tasks: Collection[str]) -> Self:
        """The gate of these tasks alone; prototypes stay, classifiers of the others go."""
        rows = [row for row, task in enumerate(self.tasks) if task in tasks]
        weights, classifiers = self.weights[rows], dict[str, Any]()
        if self.directions is not None and self.words is not None and self.offsets is not None:
            H = self.floors.numel()  # of prototypes
            each = weights[:, H:].view(len(rows), 2, self.classified)
            used = each.any(dim=(0, 1))  # [K]
            weights = torch.cat([weights[:, :H], each[:, :, used].flatten(1)], dim=1)
            classifiers = {"directions": self.directions[used], "words": self.words[used]}
            classifiers["offsets"] = self.offsets[:, used]
        return replace(
            self,
            **classifiers,
            weights=weights,
            thresholds=self.thresholds[rows],
            tasks=tuple(self.tasks[row] for row in rows),
            near=None if self.near is None else tuple(self.near[row] for row in rows),
        )


@dataclass(frozen=True)
class Bundle:
    """One memory. `Bundle.create` computes its digest, so the tensors must not change afterwards."""

    retrieval_keys: Tensor  # [B, d] float16, unit norm
    payload_keys: Tensor  # [L, B, J, m, D] float16 or float32, as at position 0
    payload_values: Tensor  # [L, B, J, m, V] float16 or float32
    temperature: Tensor  # [] float32, tau > 0
    value_gates: Tensor  # [L] float32; in (0, 1] if merged, any finite number if decoupled
    layer_bias: Tensor  # [L] float32, added to every memory logit of the layer
    metadata: BundleMetadata
    gate: Gate | None = None  # with its stored tensors; None for a memory that is always used
    # Entry i adds alpha_i value_gate_l map_out map_in o to the attention output o [G D] of each KV head.
    map_in: Tensor | None = None  # [L, B, J, r, G D] float16
    map_out: Tensor | None = None  # [L, B, J, G D, r] float16
    signature: Signature | None = None  # of the digest; who may sign is for the reader to decide

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
        gate: Gate | None = None,
        map_in: Tensor | None = None,
        map_out: Tensor | None = None,
        **fields: Any,
    ) -> Bundle:
        """Create a bundle: round the tensors (shapes as in `Bundle`, any float type), check them, compute the digest.

        Args:
            fields: of `BundleMetadata`, by their names; what tensors and gate tell is added.

        Raises:
            BundleError: the parts are inconsistent or out of range.
        """
        try:
            fields["settings"] = json.loads(json.dumps(fields["settings"], allow_nan=False))
        except (TypeError, ValueError) as error:
            raise BundleError(f"bundle settings must be JSON values: {error}") from error
        maps = {name: t for name, t in (("map_in", map_in), ("map_out", map_out)) if t is not None}
        try:
            metadata = BundleMetadata(
                format_version=FORMAT_VERSION,
                payload_tokens=payload_keys.shape[3] if payload_keys.ndim == 5 else 0,
                gate_tasks=() if gate is None else gate.tasks,
                gate=None if gate is None else gate.record,
                output_map=_output_map(map_in),
                **fields,
            )
        except ValidationError as error:
            raise BundleError(f"bundle metadata: {first_problem(error)}") from error
        tensors = {
            "retrieval_keys": retrieval_keys,
            "payload_keys": payload_keys,
            "payload_values": payload_values,
            "temperature": torch.as_tensor(temperature),
            "value_gates": value_gates,
            "layer_bias": layer_bias,
        }
        dtypes = dtypes_of(metadata)
        stored: dict[str, Any] = {name: _stored(t, dtypes[name]) for name, t in (tensors | maps).items()}
        bundle = cls(**stored, metadata=metadata, gate=None if gate is None else gate.stored())
        check_structure(bundle, "bundle")
        return with_metadata(bundle)

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

    @classmethod
    def of_file(cls, tensors: Mapping[str, Tensor], metadata: BundleMetadata, signature: Signature | None) -> Self:
        """The content of a file whose header was checked; nothing is copied."""
        own: dict[str, Any] = {name: t for name, t in tensors.items() if not name.startswith(_PREFIX)}
        record = metadata.gate
        gate = None if record is None else Gate.of_file(record, metadata.gate_tasks, tensors)
        return cls(**own, metadata=metadata, gate=gate, signature=signature)

    def tensors(self) -> dict[str, Tensor]:
        """The stored tensors by their names in the file; includes those of the gate if there is one."""
        of_gate = {} if self.gate is None else self.gate.tensors()
        found = {name: of_gate.get(name, getattr(self, name, None)) for name in DTYPES}
        return {name: tensor for name, tensor in found.items() if tensor is not None}

    def next(self, **changes: Any) -> Bundle:
        """The next version: as this one, to the bit, but for `changes`. It is not signed.

        Args:
            changes: tensors and fields of `BundleMetadata` by their names; `gate` is a `Gate` or None.

        Raises:
            BundleError: they do not fit the bundle.
        """
        return with_metadata(self, **{"parent_digest": self.digest, **changes})

    def take(self, rows: Sequence[int], **changes: Any) -> Bundle:
        """The next version with these entries alone, in this order.

        Its gate has the tasks that are left; `changes` are those of `next`, facts and another gate among them.
        """
        kept, tensors = torch.tensor(rows, dtype=torch.int64), self.tensors()  # [K]
        taken = {name: tensors[name].index_select(axis, kept) for name, axis in ENTRY_AXES.items() if name in tensors}
        entries = tuple(self.metadata.entries[row] for row in rows)
        tasks = {entry.task for entry in entries}
        activations = {task: value for task, value in self.metadata.activations.items() if task in tasks}
        if "gate" not in changes:
            changes["gate"] = self.gate_of(entries, changes.get("facts", self.metadata.facts))
        return self.next(**taken, entries=entries, activations=activations, **changes)

    def gate_of(self, entries: Sequence[EntryRecord], facts: Sequence[FactRecord]) -> Gate | None:
        """Its gate, of their tasks and those of its adapters alone; None if it knows none of these."""
        left = {record.task for record in (*entries, *facts)}
        left |= {record.task for record in self.metadata.task_adapters}
        if self.gate is None or left.isdisjoint(self.gate.tasks):
            return None
        return self.gate if left.issuperset(self.gate.tasks) else self.gate.take(left)

    def join(self, later: Bundle, **changes: Any) -> Bundle:
        """The next version with the entries of both, those of `later` last; `changes` are those of `next`.

        All else is as here, and as there if there are no entries here. Raises BundleError: the entries differ in shape,
        or are in other layers.
        """
        metadata, new = self.metadata, later.metadata
        names = [name for name in ENTRY_AXES if name in later.tensors()]
        if not self.num_entries:
            entries = {name: later.tensors()[name] for name in names}
            shape = {name: getattr(new, name) for name in ("payload_tokens", "payload_dtype", "output_map", "layers")}
            shape |= {"value_gates": later.value_gates, "layer_bias": later.layer_bias}
            return self.next(**entries, **shape, entries=new.entries, activations=new.activations, **changes)
        if list(metadata.memory_layers) != list(new.memory_layers):
            raise BundleError(
                f"the entries of two bundles cannot be joined: one memory is in the layers "
                f"{list(metadata.memory_layers)}, the other in {list(new.memory_layers)}"
            )
        try:
            both = {name: torch.cat([self.tensors()[name], later.tensors()[name]], ENTRY_AXES[name]) for name in names}
        except (KeyError, RuntimeError) as error:
            raise BundleError(f"the entries of two bundles cannot be joined: {error}") from error
        activations = {**metadata.activations, **new.activations}
        return self.next(**both, entries=metadata.entries + new.entries, activations=activations, **changes)

    def with_gate(self, gate: Gate, settings: Mapping[str, Any]) -> Bundle:
        """The next version with this gate.

        Args:
            gate: for the same tasks, in the types in which a bundle stores it.
            settings: what is recorded of the fit, in the place of what was recorded of the one before.

        Raises:
            BundleError: the gate does not fit the bundle.
        """
        return self.next(gate=gate, settings=self.metadata.settings | dict(settings))

    def require_backbone(self, served: BackboneFingerprint, name: str = "bundle") -> None:
        """Refuse to be used with another model.

        Raises:
            FingerprintMismatch: listing every difference.
        """
        require_backbone(self.metadata, served, name)


def bundle_without_entries(backbone: BackboneFingerprint, **arguments: Any) -> Bundle:
    """A bundle of task adapters or facts alone: `arguments` are the others of `Bundle.create`."""
    shape = (backbone.num_layers, 0, backbone.num_kv_heads, 1)  # [L, B, J, m]
    return Bundle.create(
        retrieval_keys=torch.zeros(0, backbone.hidden_size),
        payload_keys=torch.zeros(*shape, backbone.head_dim),
        payload_values=torch.zeros(*shape, backbone.value_size),
        temperature=1.0,
        value_gates=torch.ones(backbone.num_layers),
        layer_bias=torch.zeros(backbone.num_layers),
        backbone=backbone,
        budget=1,
        entries=(),
        weighting="uniform",
        form="decoupled",
        **arguments,
    )


def require_backbone(metadata: BundleMetadata, served: BackboneFingerprint, name: str) -> None:
    """See `Bundle.require_backbone`; the metadata suffices."""
    if differences := metadata.backbone.differences(served):
        raise FingerprintMismatch(f"{name} was made for another backbone: " + "; ".join(differences))


def with_metadata(bundle: Bundle, **changes: Any) -> Bundle:
    """A bundle with other fields of `BundleMetadata`, or other tensors; it has another digest, and is not signed.

    Raises:
        BundleError: they do not fit the bundle.
    """
    of_metadata = {name: value for name, value in changes.items() if name in BundleMetadata.model_fields}
    others = {name: value for name, value in changes.items() if name not in of_metadata}
    if "gate" in of_metadata:
        gate: Gate | None = of_metadata["gate"]
        of_metadata["gate"] = None if gate is None else gate.record
        of_metadata["gate_tasks"] = () if gate is None else gate.tasks
        others["gate"] = gate
    metadata = bundle.metadata.model_copy(update=of_metadata)
    bundle = replace(bundle, **others, metadata=metadata, signature=None)
    check_structure(bundle, "bundle")
    bundle = replace(bundle, metadata=metadata.model_copy(update={"digest": bundle_digest(bundle)}))
    check_values(bundle, "bundle")
    return bundle


def _stored(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.detach().to("cpu", dtype).clone().contiguous()


def facts_of(bundle: Bundle | None) -> dict[str, Any]:
    """What `Bundle.create` takes for the next version to have the facts of a bundle, if there is one."""
    if bundle is None:
        return {}
    return {"facts": bundle.metadata.facts}


def bundle_digest(bundle: Bundle) -> str:
    """sha256 over every tensor (name, dtype, shape, bytes) and all metadata but the digest itself.

    Two bundles that behave differently never share a digest, and no byte of the metadata can change unnoticed.
    """
    sha = hashlib.sha256()
    metadata = bundle.metadata.model_dump(mode="json", exclude={"digest"})
    rest()
    sha.update(json.dumps(metadata, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode())
    rest()
    for name, tensor in sorted(bundle.tensors().items()):
        sha.update(f"\n{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        for piece in _pieces(tensor):
            sha.update(piece.view(torch.uint8).numpy().data)
    return sha.hexdigest()


def _pieces(tensor: Tensor) -> Iterator[Tensor]:
    """A tensor's values, flat, with a rest after each piece."""
    for piece in torch.split(tensor.contiguous().reshape(-1), AT_ONCE):
        yield piece
        rest()


def _output_map(map_in: Tensor | None) -> OutputMap | None:
    """The shape of maps of which this [L, B, J, r, G D] is the inner half."""
    if map_in is None:
        return None
    if map_in.ndim != 5:
        raise BundleError(f"bundle: map_in must have 5 dimensions, found {map_in.ndim}")
    return OutputMap(rank=map_in.shape[3], width=map_in.shape[4])


def dtypes_of(metadata: BundleMetadata) -> dict[str, torch.dtype]:
    """Return the type that each tensor must have according to the metadata."""
    return DTYPES | dict.fromkeys(PAYLOADS, getattr(torch, metadata.payload_dtype))


def expected_shapes(metadata: BundleMetadata) -> dict[str, tuple[int, ...]]:
    """Return the shape that each tensor must have according to the metadata."""
    backbone, B, m = metadata.backbone, len(metadata.entries), metadata.payload_tokens
    each = (len(metadata.memory_layers), B, backbone.num_kv_heads)  # [L, B, J]
    gate: dict[str, tuple[int, ...]] = {}
    if (record := metadata.gate) is not None:
        S, P, C, K = len(record.layers), record.prototypes, len(metadata.gate_tasks), record.classified
        features = (S, backbone.num_features)
        gate = {"gate_center": features, "gate_scale": features, "gate_prototypes": (S, P, features[1])}
        gate |= {"gate_floors": (S, P), "gate_weights": (C, S * P + 2 * K), "gate_thresholds": (C,)}
        if K:
            gate |= {"gate_directions": (K, *features), "gate_rarity": (BUCKETS,)}
            gate |= {"gate_words": (K, BUCKETS), "gate_offsets": (2, K)}
            gate |= {"gate_clause_ends": (record.clause_ends,)}
    maps = {}
    if (shape := metadata.output_map) is not None:
        maps = {"map_in": (*each, shape.rank, shape.width), "map_out": (*each, shape.width, shape.rank)}
    return {
        "retrieval_keys": (B, backbone.hidden_size),
        "payload_keys": (*each, m, backbone.head_dim),
        "payload_values": (*each, m, backbone.value_size),
        "temperature": (),
        "value_gates": each[:1],
        "layer_bias": each[:1],
        **gate,
        **maps,
    }


def check_structure(bundle: Bundle, name: str) -> None:
    check_metadata(bundle.metadata, name)
    check_shapes(bundle, name)


def check_shapes(bundle: Bundle, name: str) -> None:
    """Check that the tensors are those of the metadata."""
    shapes, dtypes, tensors = expected_shapes(bundle.metadata), dtypes_of(bundle.metadata), bundle.tensors()
    if wrong := set(tensors) ^ set(shapes):
        if wrong & {"map_in", "map_out"}:
            raise BundleError(f"{name}: maps need both map_in and map_out, or neither")
        raise BundleError(f"{name}: a relevance gate needs all of its tensors and at least one task, or none of them")
    for tensor_name, shape in shapes.items():
        tensor = tensors[tensor_name]
        if tuple(tensor.shape) != shape or tensor.dtype != dtypes[tensor_name]:
            raise BundleError(
                f"{name}: {tensor_name} must be {dtypes[tensor_name]} {list(shape)}, "
                f"found {tensor.dtype} {list(tensor.shape)}"
            )
    gate = bundle.gate
    if gate is not None and (gate.record, gate.tasks) != (bundle.metadata.gate, bundle.metadata.gate_tasks):
        raise BundleError(f"{name}: the gate is not the one that the metadata describes")


def check_values(bundle: Bundle, name: str) -> None:
    for tensor_name, tensor in bundle.tensors().items():
        for piece in _pieces(tensor):
            # NaN propagates into the extremes, so this equals isfinite(piece).all() but is about 25 times as fast.
            if piece.numel() and not torch.stack(torch.aminmax(piece)).isfinite().all():
                raise BundleError(f"{name}: {tensor_name} contains NaN or infinite values")
    norms = bundle.retrieval_keys.float().norm(dim=1)  # [B]
    rest()
    if len(wrong := ((norms - 1).abs() > UNIT_NORM_TOLERANCE).nonzero()):
        worst = int(wrong[0])
        raise BundleError(f"{name}: retrieval key {worst} must have norm 1, found {float(norms[worst]):.6g}")
    if not bundle.temperature > 0:
        raise BundleError(f"{name}: temperature must be above 0, found {float(bundle.temperature):.6g}")
    merged = bundle.metadata.form == "merged"
    if merged and not bool(((bundle.value_gates > 0) & (bundle.value_gates <= 1)).all()):
        raise BundleError(f"{name}: value_gates must be above 0 and at most 1")
    if (gate := bundle.gate) is not None:
        _check_gate_values(gate, name)
    if bundle_digest(bundle) != bundle.digest:
        raise BundleError(f"{name}: the content does not match its digest: the file is damaged or was altered")


def _check_gate_values(gate: Gate, name: str) -> None:
    norms = gate.prototypes.float().norm(dim=2)  # [S, P]
    if (
        norms.numel()
        and abs((farthest := float(norms.flatten()[(norms - 1).abs().argmax()])) - 1) > UNIT_NORM_TOLERANCE
    ):
        raise BundleError(f"{name}: gate_prototypes must have norm 1, found {farthest:.6g}")
    if gate.rarity is not None and not bool((gate.rarity > 0).all()):
        raise BundleError(f"{name}: gate_rarity must be above 0, found {float(gate.rarity.min()):.6g}")
    if not bool((gate.scale > 0).all()):
        raise BundleError(f"{name}: gate_scale must be above 0, found {float(gate.scale.min()):.6g}")
    if not bool(((gate.floors >= 0) & (gate.floors < 1)).all()):
        raise BundleError(f"{name}: gate_floors must be at least 0 and below 1")
    if not bool((gate.thresholds > 0).all()):
        raise BundleError(
            f"{name}: gate_thresholds must be above 0, or the gate opens for everything; "
            f"found {float(gate.thresholds.min()):.6g}"
        )
