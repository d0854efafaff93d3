"""Request and response bodies of the memory routes. Errors have vLLM's format, `{"error": {...}}`."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class LoadMemoryBundleRequest(BaseModel):
    """Body of POST /v1/load_memory_bundle."""

    model_config = ConfigDict(extra="forbid")

    name: str
    path: str  # on the server's machine
    replace: bool = False  # allow a name that is already loaded


class UnloadMemoryBundleRequest(BaseModel):
    """Body of POST /v1/unload_memory_bundle."""

    model_config = ConfigDict(extra="forbid")

    name: str


class MemoryBundleCard(BaseModel):
    """One served name and the bundle behind it."""

    object: Literal["memory_bundle"] = "memory_bundle"
    name: str
    path: str | None  # shown to the admin only
    digest: str
    entries: int  # B
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


class DrainingMemory(BaseModel):
    """A version without a name, kept until its last request ends."""

    digest: str
    active_requests: int


class MemoryBundleList(BaseModel):
    """Response of GET /v1/memory_bundles."""

    object: Literal["list"] = "list"
    data: list[MemoryBundleCard]
    draining: list[DrainingMemory] = Field(default_factory=list)


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
