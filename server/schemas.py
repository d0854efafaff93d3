"""Request and response bodies of the memory routes. Errors have vLLM's format, `{"error": {...}}`."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class LoadMemoryBundleRequest(BaseModel):
    """Body of POST /v1/load_memory_bundle."""

    model_config = ConfigDict(extra="forbid")

    name: str
    path: str  # on the server's machine
    replace: bool = False  # allow a name that is already loaded
    expected_digest: str | None = None  # only if the name stands for this version; implies `replace`


class UnloadMemoryBundleRequest(BaseModel):
    """Body of POST /v1/unload_memory_bundle."""

    model_config = ConfigDict(extra="forbid")

    name: str
    expected_digest: str | None = None  # only if the name stands for this version


class RollbackMemoryBundleRequest(BaseModel):
    """Body of POST /v1/rollback_memory_bundle."""

    model_config = ConfigDict(extra="forbid")

    name: str
    digest: str | None = None  # of the version to go back to; null for the one before
    expected_digest: str | None = None  # only if the name stands for this version


class MemoryVersion(BaseModel):
    """A version that a name has stood for."""

    digest: str
    parent_digest: str | None  # of the memory that it was made from
    loaded_at: datetime
    by: str | None  # shown to the admin only, like the source
    source: str | None


class MemoryBundleCard(BaseModel):
    """One served name and the bundle behind it."""

    object: Literal["memory_bundle"] = "memory_bundle"
    name: str
    path: str | None  # shown to the admin only
    digest: str
    entries: int  # B
    expired_entries: int  # of these, those that are not used any more
    budget: int  # the maximum number of entries
    payload_tokens: int  # m
    form: str
    weighting: str
    activations: dict[str, str]  # by task; empty for merged memory
    task_adapters: dict[str, str | None]  # the folders of LoRA adapters, by task; shown to the admin only
    tasks: dict[str, int]  # entries by task
    gate_tasks: list[str] | None  # the tasks of the relevance gate; null without a gate
    file_bytes: int
    resident_bytes: int  # on one worker rank
    adapter: str | None
    active_requests: int  # on this version, under any of its names
    versions: list[MemoryVersion]  # those that are kept, this one first


class DrainingMemory(BaseModel):
    """A version without a name, kept until its last request ends."""

    digest: str
    active_requests: int


class MemoryBundleList(BaseModel):
    """Response of GET /v1/memory_bundles."""

    object: Literal["list"] = "list"
    data: list[MemoryBundleCard]
    draining: list[DrainingMemory] = Field(default_factory=list)


class ForgetMemoryVersionsRequest(BaseModel):
    """Body of POST /v1/forget_memory_versions."""

    model_config = ConfigDict(extra="forbid")

    name: str
    digest: str | None = None  # of the version to forget; null for all but the one that the name stands for
    expected_digest: str | None = None  # only if the name stands for this version


class ForgottenVersions(BaseModel):
    """Response of POST /v1/forget_memory_versions."""

    name: str
    digest: str  # what the name stands for
    forgotten: list[str]  # digests
    in_use: list[str]  # of these, what running requests or other names still use


class UnloadMemoryBundleResponse(BaseModel):
    """Response of POST /v1/unload_memory_bundle."""

    name: str
    digest: str
    unloaded: Literal[True] = True


class MemoryTrace(BaseModel):
    """Response of GET /v1/memory_trace/{response_id}: one trace per prompt or turn of the response."""

    object: Literal["memory_trace"] = "memory_trace"
    id: str
    traces: list[dict[str, Any]]
