"""The plugin's settings, read from vLLM's `--additional-config '{"inducekv": {...}}'`."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from ..errors import ConfigError, problems_in

if TYPE_CHECKING:
    from vllm.config import VllmConfig

CONFIG_KEY = "inducekv"
DEFAULT_POOL_ENTRIES = 512  # the paper's largest budget
DEFAULT_HOST_BYTES = 2**28
MAX_POOL_ENTRIES = 2**27  # places in the pool are 32-bit numbers
WORKER_CLS = "inducekv_vllm.worker.InduceKVWorker"  # for --worker-cls
ADMIN_KEY_VARIABLE = "INDUCEKV_ADMIN_KEY"  # of the server, and of whoever changes its bundles
ADMIN_HEADER = "X-InduceKV-Admin-Key"
SCHEDULER_CLS = "inducekv_vllm.scheduler.memory_scheduler"  # for --scheduler-cls
RUN_VARIABLE = "INDUCEKV_RUN"  # a folder of one run of a server; `inducekv-serve` makes it


class InduceKVConfig(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    bundles: dict[str, str] = Field(default_factory=dict)  # served name -> bundle path, loaded at start
    # Of one request; None for 1, and 2 where one is shared. If it is 2, a request may name any second one.
    max_memories: int | None = Field(default=None, ge=1, le=2)
    shared: str | None = None  # the name of the bundle that a request to any other one has as its second memory
    top_k: int | None = Field(default=None, ge=1)  # entries retrieved per request; None for all B
    # The size of the resident pool, in entries of 8 tokens; it holds every loaded bundle.
    memory_pool_entries: int = Field(default=DEFAULT_POOL_ENTRIES, ge=1, le=MAX_POOL_ENTRIES)
    # Of each worker: bundles that have left the pool, and may come back, stay in host memory up to this size.
    memory_host_bytes: int = Field(default=DEFAULT_HOST_BYTES, ge=0)
    # Folders that bundles may be loaded from while the server runs; none turns such loads off.
    roots: list[str] = Field(default_factory=list)
    # Where bundles that nobody has loaded are looked up by name, when a request asks for them: server/resolvers.py.
    resolver: str | None = None
    resolver_refresh_s: float = Field(default=1.0, ge=0, allow_inf_nan=False)  # a name found is not looked up so long
    resolver_cache_bytes: int = Field(
        default=10 * 2**30, ge=0
    )  # of what is fetched, in the folder of the user's caches
    # A file for what is loaded, with its versions and an audit chain; None keeps it while the server runs.
    state: str | None = None
    keep_versions: int = Field(default=3, ge=1)  # of each name, for a rollback
    require_signature: list[str] = Field(default_factory=list)  # public keys (PEM files); one must have signed a bundle
    judge: str | None = None  # of facts: a sequence classifier, a folder or an id of the hub; None: the served model
    encoder: str | None = None  # of sentences, for what a judge is asked: a folder or an id of the hub
    # Of the judge of facts: the log-odds from which on two questions are taken for one; None for the measured ones.
    judge_threshold: float | None = Field(default=None, ge=-99, le=99)
    audit_answers: bool = False  # the audit chain of the state has every answer too
    memory_page: bool = False  # a page for people at /memory, and the latest decisions for the admin

    @model_validator(mode="after")
    def _answers_need_a_file(self) -> InduceKVConfig:
        if self.audit_answers and self.state is None:
            raise ValueError("audit_answers needs state, the file to record them in")
        return self

    @model_validator(mode="after")
    def _shared_is_loaded(self) -> InduceKVConfig:
        if self.shared is not None and (self.shared not in self.bundles or self.most_memories < 2):
            raise ValueError(
                f"shared (--memory-shared) must be the name of one of the bundles (--memory), with max_memories 2; "
                f"found {self.shared!r}, bundles {', '.join(self.bundles) or 'none'}, max_memories {self.most_memories}"
            )
        return self

    @property
    def most_memories(self) -> int:
        """Of one request: the second one needs slots of its own."""
        return self.max_memories or (1 if self.shared is None else 2)

    @classmethod
    def from_vllm(cls, vllm_config: VllmConfig) -> InduceKVConfig | None:
        """Return the settings this engine was started with, or None if it was started without memory.

        Raises:
            ConfigError: a setting is unknown, has the wrong type or is out of range.
        """
        additional: Any = vllm_config.additional_config
        if not isinstance(additional, dict) or CONFIG_KEY not in additional:
            return None
        return cls.parse(additional[CONFIG_KEY])

    @staticmethod
    def named_alone(vllm_config: VllmConfig) -> VllmConfig:
        """A copy that says that there is memory, and nothing of its settings.

        For a worker: vLLM finds a model that it has compiled before by a hash of its whole configuration, and no
        setting of memory is compiled into one.
        """
        named = copy.copy(vllm_config)
        additional = vllm_config.additional_config
        named.additional_config = {**(additional if isinstance(additional, dict) else {}), CONFIG_KEY: {}}
        return named

    @classmethod
    def parse(cls, settings: object) -> InduceKVConfig:
        """Validate a settings dictionary. The ConfigError names every invalid setting."""
        try:
            return cls.model_validate(settings)
        except ValidationError as error:
            raise ConfigError(f"additional_config.inducekv: {problems_in(error)}") from error
