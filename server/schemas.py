"""What the memory routes take and answer. Errors have vLLM's own form, `{"error": {...}}`."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class LoadMemoryBundleRequest(BaseModel):
    """Body of POST /v1/load_memory_bundle."""

    model_config = ConfigDict(extra="forbid")

    name: str
    path: str  # on the server's machine
    replace: bool = False  # whether a bundle of this name may be loaded already


class UnloadMemoryBundleRequest(BaseModel):
    """Body of POST /v1/unload_memory_bundle."""

    model_config = ConfigDict(extra="forbid")

    name: str


class MemoryBundleCard(BaseModel):
    """One served name and the bundle behind it."""

    object: Literal["memory_bundle"] = "memory_bundle"
    name: str
    path: str
    digest: str
    entries: int  # B
    budget: int  # the most entries the memory may ever have
    payload_tokens: int  # m
    weighting: str
    tasks: dict[str, int]  # entries by task
    gate_tasks: list[str] | None  # what the relevance gate tells apart; null without a gate
    file_bytes: int
    resident_bytes: int  # on one worker rank
    adapter: str | None
    active_requests: int  # on this version, under whatever name they asked for it


class DrainingMemory(BaseModel):
    """A version that no name stands for any more, kept until its last request has ended."""

    digest: str
    active_requests: int


class MemoryBundleList(BaseModel):
    """Answer of GET /v1/memory_bundles."""

    object: Literal["list"] = "list"
    data: list[MemoryBundleCard]
    draining: list[DrainingMemory] = Field(default_factory=list)


class UnloadMemoryBundleResponse(BaseModel):
    """Answer of POST /v1/unload_memory_bundle."""

    name: str
    digest: str
    unloaded: Literal[True] = True


class MemoryTrace(BaseModel):
    """Answer of GET /v1/memory_trace/{response_id}: one trace for each prompt or turn of the response."""

    object: Literal["memory_trace"] = "memory_trace"
    id: str
    traces: list[dict[str, Any]]
