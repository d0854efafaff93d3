"""Request and response bodies of the memory routes. Errors have vLLM's format, `{"error": {...}}`.

What a schema says of lengths and patterns is checked where the value is used, with an error that names what was found.
"""

from datetime import datetime
from enum import StrEnum
from typing import Annotated, Any, Final, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from inducekv_vllm.bundle.metadata import MAX_WORDING_BYTES, MAX_WORDINGS
from inducekv_vllm.teaching import DEFAULT_BUDGET_BYTES, DEFAULT_TASK, WhenFull

NAME_PATTERN: Final = "^[A-Za-z0-9][A-Za-z0-9._:/@-]{0,127}$"
PATH_BYTES: Final = 4096  # Linux's PATH_MAX
MAX_EXAMPLES: Final = 10_000  # in one request
LEAST_BUDGET: Final = 2**16  # bytes of a bundle that is taught
DIGEST: Final = "51c06bd8b5ea7b0a8f6f4a4a4d4b0de5ad5ce26b4e6dd2b7cb7b4f7bd1f4a3c0"
EARLIER_DIGEST: Final = "9e1f0c5a3f6e8d7c2b1a09f8e7d6c5b4a39281706f5e4d3c2b1a0f9e8d7c6b5a"


class Change(StrEnum):
    """A kind of change. Its value names it in metrics, answers, the log and the audit chain."""

    LOAD = "load"
    ROLLBACK = "rollback"
    UNLOAD = "unload"
    FORGET = "forget"
    TEACH = "teach"
    FORGET_FACTS = "forget_facts"

    @property
    def makes_first(self) -> bool:
        """Whether it may make the first version of a name."""
        return self in (Change.LOAD, Change.TEACH)


BundleName = Annotated[
    str,
    Field(
        description="The name of a bundle: what requests give as `model`.",
        examples=["guild"],
        json_schema_extra={"minLength": 1, "maxLength": 128, "pattern": NAME_PATTERN},
    ),
]
ExpectedDigest = Annotated[
    str | None,
    Field(
        description="Change the name only while it stands for this version; otherwise the answer is 409.",
        examples=[DIGEST],
    ),
]


class _Change(BaseModel):
    model_config = ConfigDict(extra="forbid")

    name: BundleName
    expected_digest: ExpectedDigest = None


class UnloadMemoryBundleRequest(_Change):
    """Body of POST /v1/unload_memory_bundle."""


class LoadMemoryBundleRequest(_Change):
    """Body of POST /v1/load_memory_bundle."""

    path: str = Field(
        description="The bundle's file on the server's machine, in a folder that the server loads from "
        "(`--memory-root`); a relative path is beneath the first of them.",
        examples=["guild.safetensors"],
        json_schema_extra={"minLength": 1, "maxLength": PATH_BYTES},
    )
    replace: bool = Field(default=False, description="Allow a name that is loaded already.")
    expected_digest: ExpectedDigest = Field(default=None, description="As for the other changes; implies `replace`.")
    pin: bool | None = Field(
        default=None,
        description="Whether what the name stands for stays in the pool while nobody asks for it; null: as before.",
    )


class RollbackMemoryBundleRequest(_Change):
    """Body of POST /v1/rollback_memory_bundle."""

    digest: str | None = Field(
        default=None,
        description="The version to go back to, one of those that are kept; null for the one before.",
        examples=[EARLIER_DIGEST],
    )


class ExampleMessage(BaseModel):
    """One message of an example, as in a chat request; its content is text, and pictures in the user's."""

    model_config = ConfigDict(extra="forbid")

    role: Literal["system", "user"]
    content: str | list[dict[str, Any]]


Messages = Annotated[
    list[ExampleMessage],
    Field(
        description="The question: one message of the user, in text, with pictures or without. A system message before "
        "it is not looked at.",
        examples=[[{"role": "user", "content": "What is the code of Lima?"}]],
        min_length=1,
        max_length=2,
    ),
]
Wordings = Annotated[
    list[str],
    Field(
        description=f"Other wordings of the question, at most {MAX_WORDING_BYTES} bytes each.",
        examples=[["How is Lima abbreviated?"]],
        max_length=MAX_WORDINGS,
    ),
]
Answer = Annotated[str, Field(description="What the model shall say.", examples=["LIM"], min_length=1)]
TaskName = Annotated[
    str,
    Field(
        description="Facts of one task are told from each other by the words in which their questions differ. Where "
        "the bundle has a relevance gate for the task, it must open.",
        examples=["codes"],
        min_length=1,
        max_length=256,
    ),
]


class TaughtExample(BaseModel):
    """A question and its answer."""

    model_config = ConfigDict(extra="forbid")

    id: str | None = Field(
        default=None,
        description="Of the example; one that the bundle has is corrected. Null: it follows from task and question.",
        min_length=1,
        max_length=256,
    )
    task: TaskName = DEFAULT_TASK
    messages: Messages
    answer: Answer
    also: Wordings = []
    expires_at: datetime | None = Field(default=None, description="When it is not used any more, in UTC.")


class TeachRequest(BaseModel):
    """Body of POST /v1/memory_bundles/{name}/examples."""

    model_config = ConfigDict(extra="forbid")

    examples: Annotated[list[TaughtExample], Field(min_length=1, max_length=MAX_EXAMPLES)]
    budget_bytes: int | None = Field(
        default=None,
        description=f"Bytes that the bundle may take; null for what it has, at first {DEFAULT_BUDGET_BYTES}.",
        ge=LEAST_BUDGET,
        le=2**40,
    )
    when_full: WhenFull = Field(
        default="forget",
        description="What happens beyond the budget: the earlier facts that answered or were taught longest ago are "
        "forgotten, or the call is refused.",
    )
    expected_digest: ExpectedDigest = None


class CorrectExampleRequest(BaseModel):
    """Body of PATCH /v1/memory_bundles/{name}/examples/{id}: what is null stays as it is, and something must change."""

    model_config = ConfigDict(extra="forbid")

    messages: Messages | None = None
    answer: Answer | None = None
    also: Wordings | None = Field(default=None, description="Wordings to add to those that it has.")
    without: list[str] = Field(
        default=[],
        description="Wordings to take away.",
        examples=[["How is Lima abbreviated?"]],
        max_length=MAX_WORDINGS,
    )
    expires_at: datetime | None = Field(default=None, description="When it is not used any more, in UTC.")
    expected_digest: ExpectedDigest = None

    @model_validator(mode="after")
    def _changes_something(self) -> Self:
        if not any((self.messages, self.answer, self.also, self.without, self.expires_at)):
            raise ValueError(
                "nothing to correct: expected messages, answer, also, without or expires_at, found none of them"
            )
        return self


class TaughtBundle(BaseModel):
    """The version of a bundle that serves now, after a change of its examples."""

    object: Literal["memory_bundle.examples"] = "memory_bundle.examples"
    name: BundleName
    digest: str = Field(description="SHA-256 of the bundle's content, in hexadecimal.", examples=[DIGEST])
    ids: list[str] = Field(description="Of the examples that were taught, corrected or forgotten.")
    forgotten: list[str] = Field(default=[], description="Ids of earlier examples that had to go, in a full bundle.")
    superseded: list[str] = Field(
        default=[], description="Ids of examples that do not count any more: one of these has the same question."
    )
    returned: list[str] = Field(
        default=[], description="Ids of examples that count again: the one in their place was forgotten."
    )
    resembles: dict[str, list[str]] = Field(
        default={},
        description="By the ids of new examples, those of earlier ones with other answers that the served model takes "
        "for the same question. Both count.",
    )
    facts: int = Field(description="Facts of the bundle now.")


class MemoryExample(BaseModel):
    """A fact of a bundle."""

    id: str
    task: str
    question: str | None = Field(description="Shown to the admin only.")
    answer: str | None = Field(description="Shown to the admin only.")
    also: list[str] | None = Field(description="Other wordings of the question. Shown to the admin only.")
    source_digest: str = Field(description="SHA-256 of the question, in hexadecimal.")
    created_at: datetime | None
    expires_at: datetime | None
    has_picture: bool = Field(description="Whether its question is about a picture.")
    picture: str | None = Field(description="It, small, as a data URL. Shown to the admin only.")
    superseded_by: str | None = Field(description="The newer fact that answers the same question.")


class MemoryExampleList(BaseModel):
    """Response of GET /v1/memory_bundles/{name}/examples."""

    object: Literal["list"] = "list"
    digest: str = Field(description="Of the version that they belong to.", examples=[DIGEST])
    data: list[MemoryExample]
    has_more: bool = Field(description="Whether there are more after these.")


class MemoryVersion(BaseModel):
    """A version that a name has stood for."""

    digest: str = Field(description="SHA-256 of the bundle's content, in hexadecimal.", examples=[DIGEST])
    parent_digest: str | None = Field(description="Of the memory that it was made from.")
    loaded_at: datetime = Field(description="When the name began to stand for it.")
    by: str | None = Field(description="Who loaded it; shown to the admin only.")
    source: str | None = Field(description="From which path; shown to the admin only.")


class MemoryBundleCard(BaseModel):
    """One served name and the bundle behind it: the response of GET /v1/memory_bundles/{name}."""

    object: Literal["memory_bundle"] = "memory_bundle"
    name: BundleName
    path: str | None = Field(description="Where it was loaded from; shown to the admin only.")
    digest: str = Field(description="SHA-256 of the bundle's content, in hexadecimal.", examples=[DIGEST])
    entries: int = Field(description="The number of entries B.")
    expired_entries: int = Field(description="Of these, those that are not used any more: their date has passed.")
    facts: int = Field(description="The number of facts.")
    tasks: dict[str, int] = Field(description="Entries by task.", examples=[{"guild": 2, "digit": 2}])
    file_bytes: int = Field(description="Bytes of the file.")
    is_resident: bool = Field(description="Whether it is in the pool; if not, the next request waits until it is.")
    resident_bytes: int = Field(description="Bytes in the pool of one rank.")
    pinned: bool = Field(description="Whether what the name stands for stays in the pool.")
    active_requests: int = Field(description="Requests on this version, under any of its names.")
    versions: list[MemoryVersion] = Field(description="The versions that are kept of the name, the served one first.")


class DrainingMemory(BaseModel):
    """A version without a name, kept until its last request ends."""

    digest: str = Field(description="SHA-256 of the bundle's content, in hexadecimal.", examples=[DIGEST])
    active_requests: int = Field(description="Requests that still run on it.")


class MemoryBundleList(BaseModel):
    """Response of GET /v1/memory_bundles."""

    object: Literal["list"] = "list"
    data: list[MemoryBundleCard] = Field(description="One card for each name, in alphabetical order.")
    has_more: bool = Field(description="Whether there are more names after these.")
    draining: list[DrainingMemory] = Field(default_factory=list, description="Versions that no name stands for.")


class ForgetMemoryVersionsRequest(_Change):
    """Body of POST /v1/forget_memory_versions."""

    digest: str | None = Field(
        default=None, description="Of the version to forget; null for all but the one that the name stands for."
    )


class ForgottenVersions(BaseModel):
    """Response of POST /v1/forget_memory_versions."""

    name: BundleName
    digest: str = Field(description="What the name stands for.", examples=[DIGEST])
    forgotten: list[str] = Field(description="The digests of the versions that were dropped.")
    in_use: list[str] = Field(description="Of these, what running requests or other names still use.")


class UnloadMemoryBundleResponse(BaseModel):
    """Response of POST /v1/unload_memory_bundle."""

    name: BundleName
    digest: str = Field(description="Of the version that the name stood for.", examples=[DIGEST])


class MemoryDecision(BaseModel):
    """What one request was answered with."""

    at: datetime = Field(description="When its answer began.")
    bundle: BundleName
    digest: str = Field(description="The version of the bundle.", examples=[DIGEST])
    gate: dict[str, Any] | None = Field(description="As in a trace: `open`, `task`, `closed`; null without a gate.")
    facts: list[str] = Field(description="The ids of the facts that entered the answer.")
    missed: dict[str, Any] | None = Field(
        default=None,
        description="The nearest fact that was not found: `id`, `question`, `why`, and the words of either question "
        "alone, `missing` and `added`.",
    )


class MemoryDecisions(BaseModel):
    """Response of GET /v1/memory_decisions."""

    object: Literal["list"] = "list"
    data: list[MemoryDecision]


class MemoryTrace(BaseModel):
    """Response of GET /v1/memory_trace/{response_id}."""

    object: Literal["memory_trace"] = "memory_trace"
    id: str = Field(description="The id of the response.", examples=["chatcmpl-8f0c"])
    traces: list[dict[str, Any]] = Field(description="One trace for each prompt or turn of the response.")


class JudgeState(BaseModel):
    """The judge of whether two questions are one, on pairs that come with InduceKV."""

    is_able: bool | None = Field(description="Null while it is measured.")
    threshold: float | None = Field(description="Log-odds from which on a stored answer is said.")
    auroc: float | None = Field(description="That it ranks a pair of one question above one of two.")
    found: float | None = Field(description="The share of pairs of one question that pass the threshold.")
    passed: float | None = Field(description="The share of the others that do.")


class MemoryServer(BaseModel):
    """Response of GET /v1/memory_server."""

    object: Literal["memory_server"] = "memory_server"
    version: str = Field(description="The version of InduceKV.", examples=["0.2.0"])
    vllm_version: str = Field(description="The version of vLLM.", examples=["0.32.0"])
    bundle_formats: list[int] = Field(description="The versions of the bundle format that can be loaded.")
    judge: JudgeState | None = Field(
        description="Whether there is an able judge of other wordings of facts; null until a request may ask for one."
    )
