"""The one configuration object of the plugin, read from vLLM's `--additional-config '{"inducekv": {...}}'`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from .errors import ConfigError

if TYPE_CHECKING:
    from vllm.config import VllmConfig

CONFIG_KEY = "inducekv"
WORKER_CLS = "inducekv_vllm.worker.InduceKVWorker"  # what --worker-cls must name


class InduceKVConfig(BaseModel):
    """Settings of one serving engine; see the README for what each means to a user."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    bundles: dict[str, str] = Field(default_factory=dict)  # served name -> path of the bundle, loaded at start
    top_k: int | None = Field(default=None, ge=1)  # entries retrieved for a request; None retrieves all B
    remainder: bool = True  # weighting "sqrt" with top_k: what was not retrieved stays in the softmax with alpha = 0
    key_cache_entries: int = Field(default=4096, ge=0)  # query keys remembered by prompt; 0 computes every key anew

    @classmethod
    def from_vllm(cls, vllm_config: VllmConfig) -> InduceKVConfig | None:
        """The settings this engine was started with, or None where it was started without memory.

        Raises:
            ConfigError: an unknown setting, or one of the wrong type or range.
        """
        additional: Any = vllm_config.additional_config
        if not isinstance(additional, dict) or CONFIG_KEY not in additional:
            return None
        return cls.parse(additional[CONFIG_KEY])

    @classmethod
    def parse(cls, settings: object) -> InduceKVConfig:
        """Validate a settings dictionary; raises ConfigError naming every setting that is wrong."""
        try:
            return cls.model_validate(settings)
        except ValidationError as error:
            problems = "; ".join(
                f"{'.'.join(map(str, e['loc'])) or 'inducekv'}: {e['msg']} (found {e['input']!r})"
                for e in error.errors()
            )
            raise ConfigError(f"additional_config.inducekv: {problems}") from error
