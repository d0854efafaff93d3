"""The part of a bundle that is not tensors, and what must hold in it."""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, Final, Literal, Self

from PIL.Image import Image
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    FailFast,
    Field,
    ValidationError,
    model_validator,
)

from ..errors import BundleError
from ..files.picture import MAX_THUMBNAIL, digest_of, joined, thumbnail_of
from ..retrieval.entry_terms import Form, Weighting
from .activation import ACTIVATIONS, Activation

FORMAT_VERSION: Final = 2
MAX_WORDINGS: Final = 32  # of a fact's question, beside the question
MAX_WORDING_BYTES: Final = 100
MAX_ID: Final = 256  # characters; traces and audit chains repeat the ids of the entries that each answer has used
PayloadDtype = Literal["float16", "float32"]
Size = Annotated[int, Field(ge=1, lt=2**31)]  # products of a few stay numbers that can be printed


def is_unicode(name: str) -> bool:
    """Whether a bundle can record a name: that of a file which is no UTF-8 has halves of surrogate pairs."""
    return name == name.encode(errors="replace").decode()


def _in_utc(moment: datetime) -> datetime:
    if moment.utcoffset() != timedelta(0) or moment.microsecond:
        raise ValueError("a date must be in UTC, in whole seconds")
    return moment.replace(tzinfo=UTC)


def _short(wording: str) -> str:
    if (found := len(wording.encode())) > MAX_WORDING_BYTES:
        raise ValueError(f"a wording has at most {MAX_WORDING_BYTES} bytes, found {found}")
    return wording


def _jpeg(thumbnail: str) -> str:
    if not base64.b64decode(thumbnail, validate=True).startswith(b"\xff\xd8\xff"):
        raise ValueError("a picture's thumbnail must be base64 of a JPEG")
    return thumbnail


Wording = Annotated[str, Field(min_length=1), AfterValidator(_short)]
Moment = Annotated[datetime, Field(strict=True), AfterValidator(_in_utc)]


class Record(BaseModel):
    """What a bundle records of an entry or of a fact."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: str = Field(min_length=1, max_length=MAX_ID)
    task: str = Field(min_length=1)
    source_digest: str = Field(min_length=1)  # sha256 of the example's messages and image bytes
    created_at: Moment | None = None  # None: not recorded
    expires_at: Moment | None = None  # from then on it is not used in answers; None: never

    def has_expired(self, now: datetime) -> bool:
        return self.expires_at is not None and self.expires_at <= now


class EntryRecord(Record):
    """The training example that an entry was made from."""


class PictureRecord(BaseModel):
    """The pictures that a question is about: which they are, and what they look like, for people."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    digest: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]  # see `inducekv_vllm.files.picture`
    thumbnail: Annotated[str, Field(max_length=MAX_THUMBNAIL), AfterValidator(_jpeg)]

    @property
    def data_url(self) -> str:
        return f"data:image/jpeg;base64,{self.thumbnail}"

    @classmethod
    def of(cls, pictures: Sequence[Image]) -> Self:
        """At least one, decoded."""
        return cls(digest=joined([digest_of(each) for each in pictures]), thumbnail=thumbnail_of(pictures))


class FactRecord(Record):
    """A question with its answer, which takes no training: see `inducekv_vllm.facts`."""

    question: Annotated[str, Field(min_length=1)]  # the text of the last user turn
    answer: Annotated[str, Field(min_length=1)]
    also: Annotated[tuple[Wording, ...], Field(max_length=MAX_WORDINGS)] = ()  # other wordings of the question
    picture: PictureRecord | None = None

    @property
    def shown(self) -> str | None:
        """The digest of its pictures."""
        return None if self.picture is None else self.picture.digest


class AdapterRecord(BaseModel):
    """The LoRA adapter that answers a task's requests in place of memory."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    task: str = Field(min_length=1)
    path: str = Field(min_length=1)  # its folder, absolute or relative to the bundle's
    digest: str = Field(min_length=1)  # see `inducekv_vllm.bundle.adapters`
    rank: Size


class OutputMap(BaseModel):
    """The shape of the map of the attention output that every entry has for each layer and KV head."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    rank: Size  # r
    width: Size  # G V: the outputs of the query heads that share a KV head


class GateRecord(BaseModel):
    """What a relevance gate looks at, and its size."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    layers: Annotated[tuple[Annotated[int, Field(ge=0, lt=2**31)], ...], Field(min_length=1, max_length=8)]  # [S]
    prototypes: Annotated[int, Field(ge=0, le=2**16)]  # P, of each layer; at least 1, or there are classifiers
    classified: Annotated[int, Field(ge=0, le=2**16)] = 0  # K, the tasks that its classifiers were fitted to
    clause_ends: Annotated[int, Field(ge=0, le=2**24)] = 0  # E, the tokens with which a clause ends, of classifiers
    turn_begin: Annotated[tuple[int, ...], Field(max_length=64)]  # see `inducekv_vllm.gate.TurnMarks`
    turn_end: int | None
    near: tuple[Annotated[float, Field(le=0, allow_inf_nan=False)], ...] | None = None  # [C], see `RelevanceGate`


class BackboneFingerprint(BaseModel):
    """The properties that must match between the model a memory was extracted from and the model that serves it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    architecture: str
    num_layers: Size  # L
    num_kv_heads: Size  # J
    head_dim: Size  # D
    value_dim: Size | None = None  # V; None: D, as most models have
    hidden_size: Size  # d
    rope: dict[str, Any]
    norm: dict[str, Any]
    tokenizer_digest: str
    weights_digest: str  # see `inducekv_vllm.backbone.weights`
    # [L]: a hybrid's layers with attention, among others; None: the model has no others.
    attention_layers: tuple[Annotated[int, Field(ge=0, lt=2**31)], ...] | None = None

    @model_validator(mode="after")
    def _one_number_a_layer(self) -> Self:
        if (numbers := self.attention_layers) is None:
            return self
        if list(numbers) != sorted(set(numbers)) or len(numbers) != self.num_layers:
            raise ValueError(f"attention_layers must be {self.num_layers} ascending numbers, found {list(numbers)}")
        return self

    @property
    def value_size(self) -> int:
        """V"""
        return self.head_dim if self.value_dim is None else self.value_dim

    @property
    def num_features(self) -> int:
        """F = J V: of a token's values, which gates look at."""
        return self.num_kv_heads * self.value_size

    def differences(self, model: BackboneFingerprint) -> list[str]:
        """List every field in which a model differs as "field: own value, the model has another"."""
        return [
            f"{name}: {getattr(self, name)!r}, the model has {getattr(model, name)!r}"
            for name in type(self).model_fields
            if getattr(self, name) != getattr(model, name)
        ]


class BundleMetadata(BaseModel):
    """The part of a bundle that is not tensors."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format_version: Literal[2]  # `FORMAT_VERSION`
    backbone: BackboneFingerprint
    budget: Size  # the maximum number of entries
    payload_tokens: Size  # m
    payload_dtype: PayloadDtype = "float16"  # of keys and values
    # [B]; at least one, unless there are task adapters or facts. Only the first wrong one is told: all would take long.
    entries: Annotated[tuple[EntryRecord, ...], FailFast()]
    weighting: Weighting
    recipe: str  # the recipe that made the memory; "build" is extraction only
    settings: dict[str, Any]  # the recipe's settings, JSON values only
    adapter: None = None  # of this format: memory that needs a LoRA adapter is not served
    parent_digest: str | None = None  # the memory this one was made from
    gate_tasks: Annotated[tuple[str, ...], FailFast()] = ()  # [C], the gate's tasks; empty without a gate
    gate: GateRecord | None = None
    form: Form = "merged"
    activations: dict[str, Activation] = {}  # by task, for every task of the entries; merged memory has none
    # Of the tasks that have no entries; decoupled form only.
    task_adapters: Annotated[tuple[AdapterRecord, ...], FailFast()] = ()
    output_map: OutputMap | None = None  # decoupled form only
    # Those of the backbone's layers that entries have payloads for, ascending; decoupled form only. None: all layers.
    # None is not written, so older bundles keep their digests.
    layers: Annotated[tuple[Annotated[int, Field(ge=0, lt=2**31)], ...], Field(min_length=1)] | None = Field(
        default=None, exclude_if=lambda layers: layers is None
    )
    facts: Annotated[tuple[FactRecord, ...], FailFast()] = ()
    digest: str = ""  # see `bundle_digest`

    @property
    def memory_layers(self) -> Sequence[int]:
        """The numbers of the layers [L] that entries have payloads for."""
        return range(self.backbone.num_layers) if self.layers is None else self.layers

    @property
    def tasks(self) -> tuple[str, ...]:
        """The tasks of the entries, in the order of their first entries."""
        return tuple(dict.fromkeys(entry.task for entry in self.entries))

    @property
    def fact_tasks(self) -> tuple[str, ...]:
        """The tasks of the facts, in the order of their first facts."""
        return tuple(dict.fromkeys(fact.task for fact in self.facts))

    def activation_of(self, task: str | None) -> Activation:
        """From where memory acts on a request that the gate sends to `task`; None for a bundle without a gate."""
        if self.form == "merged":
            return "prompt"
        earliest = min(self.activations.values(), key=ACTIVATIONS.index)
        return earliest if task is None else self.activations.get(task, "prompt")

    def adapter_of(self, task: str | None) -> AdapterRecord | None:
        """The adapter that answers a request of this task, if it has one."""
        return next((record for record in self.task_adapters if record.task == task), None)


def check_metadata(metadata: BundleMetadata, name: str) -> None:
    """Check what the types cannot; error messages begin with `name`.

    Raises:
        BundleError: names the first problem.
    """
    _check_entries(metadata, name)
    _check_gate(metadata, name)
    _check_form(metadata, name)
    _check_task_adapters(metadata, name)
    if metadata.gate is not None:
        _check_gate_tasks(metadata, name)


def _check_entries(metadata: BundleMetadata, name: str) -> None:
    if len(metadata.entries) > metadata.budget:
        raise BundleError(f"{name}: {len(metadata.entries)} entries exceed the budget of {metadata.budget}")
    if (twice := _duplicate([record.id for record in (*metadata.entries, *metadata.facts)])) is not None:
        raise BundleError(f"{name}: entry id {twice!r} occurs more than once")


def _check_gate(metadata: BundleMetadata, name: str) -> None:
    if bool(metadata.gate_tasks) != (metadata.gate is not None):
        raise BundleError(f"{name}: a relevance gate needs tasks and what it looks at, or neither")
    if metadata.gate is not None:
        layers, available = metadata.gate.layers, metadata.backbone.num_layers
        if not metadata.gate.prototypes and not metadata.gate.classified:
            raise BundleError(f"{name}: a gate needs prototypes or classifiers, found neither")
        if list(layers) != sorted(set(layers)) or layers[-1] >= available:
            raise BundleError(f"{name}: a gate looks at ascending layers below {available}, found {list(layers)}")


def _duplicate(names: Sequence[str]) -> str | None:
    return next((name for name, count in Counter(names).items() if count > 1), None)


def _check_form(metadata: BundleMetadata, name: str) -> None:
    if metadata.output_map is not None:
        _check_output_map(metadata, metadata.output_map, name)
    if metadata.layers is not None:
        _check_layers(metadata, metadata.layers, name)
    weightings = ("prior", "uniform") if metadata.form == "decoupled" else ("sqrt", "prior", "uniform")
    if metadata.weighting not in weightings:
        raise BundleError(
            f"{name}: {metadata.form} memory needs the weighting {' or '.join(weightings)}, "
            f"found {metadata.weighting!r}"
        )
    tasks = metadata.tasks if metadata.form == "decoupled" else ()
    if set(metadata.activations) != set(tasks):
        raise BundleError(
            f"{name}: {metadata.form} memory needs activations for the tasks [{', '.join(sorted(tasks))}], "
            f"found [{', '.join(sorted(metadata.activations))}]"
        )


def _check_layers(metadata: BundleMetadata, layers: Sequence[int], name: str) -> None:
    if metadata.form != "decoupled":
        raise BundleError(f"{name}: memory in some layers alone needs the decoupled form, found {metadata.form!r}")
    available = metadata.backbone.num_layers
    if list(layers) != sorted(set(layers)) or layers[-1] >= available:
        raise BundleError(f"{name}: memory is in ascending layers below {available}, found {list(layers)}")


def _check_output_map(metadata: BundleMetadata, output_map: OutputMap, name: str) -> None:
    if metadata.form != "decoupled":
        raise BundleError(f"{name}: maps of the attention output need the decoupled form, found {metadata.form!r}")
    if metadata.backbone.value_dim is not None:
        raise BundleError(f"{name}: a memory of latents (MLA) has no maps of the attention output, found some")
    if output_map.width % metadata.backbone.head_dim:
        raise BundleError(
            f"{name}: a map acts on whole heads of {metadata.backbone.head_dim}, found the width {output_map.width}"
        )
    if output_map.rank > output_map.width:
        raise BundleError(
            f"{name}: a map of width {output_map.width} has at most that rank, found the rank {output_map.rank}"
        )


def _check_task_adapters(metadata: BundleMetadata, name: str) -> None:
    records = metadata.task_adapters
    if not records:
        if not metadata.entries and not metadata.facts:
            raise BundleError(f"{name}: there are neither entries nor task adapters nor facts")
        return
    if metadata.form != "decoupled":
        raise BundleError(f"{name}: a bundle with task adapters has the decoupled form, found {metadata.form!r}")
    if not metadata.gate_tasks:
        raise BundleError(f"{name}: task adapters need a relevance gate, which chooses between them")
    if (twice := _duplicate([record.task for record in records])) is not None:
        raise BundleError(f"{name}: task {twice!r} has two adapters")
    if (twice := _duplicate([record.digest for record in records])) is not None:
        tasks = ", ".join(record.task for record in records if record.digest == twice)
        raise BundleError(f"{name}: the tasks {tasks} name one adapter")
    entry_tasks, gate_tasks = set(metadata.tasks), set(metadata.gate_tasks)
    for record in records:
        if record.task in entry_tasks:
            raise BundleError(f"{name}: task {record.task!r} has both entries and an adapter")
        if record.task not in gate_tasks:
            raise BundleError(f"{name}: the gate does not have the task {record.task!r} of an adapter")


def _check_gate_tasks(metadata: BundleMetadata, name: str) -> None:
    if (twice := _duplicate(metadata.gate_tasks)) is not None:
        raise BundleError(f"{name}: gate task {twice!r} occurs more than once")
    near = metadata.gate.near if metadata.gate is not None else None
    if near is not None and len(near) != len(metadata.gate_tasks):
        raise BundleError(
            f"{name}: a gate of {len(metadata.gate_tasks)} tasks needs as many numbers `near`, found {len(near)}"
        )
    tasks = set(metadata.gate_tasks)
    if stray := next((entry for entry in metadata.entries if entry.task not in tasks), None):
        raise BundleError(
            f"{name}: entry {stray.id!r} belongs to the task {stray.task!r}, which the gate does not have"
        )
    served = {*metadata.tasks, *metadata.fact_tasks, *(record.task for record in metadata.task_adapters)}
    if empty := tasks - served:
        raise BundleError(f"{name}: gate task {min(empty)!r} has no entries, no facts and no adapter")
    if metadata.weighting == "sqrt":
        # Entries of other tasks must be absent; in "sqrt" weighting an entry of alpha = 0 still takes its share.
        raise BundleError(f'{name}: a relevance gate needs another weighting than "sqrt"')


def first_problem(error: ValidationError) -> str:
    problem = error.errors(include_url=False, include_context=False, include_input=False)[0]
    place = ".".join(str(part) for part in problem["loc"])
    return f"{place or 'metadata'}: {problem['msg']}"
