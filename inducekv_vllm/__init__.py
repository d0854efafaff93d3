"""InduceKV for vLLM: fixed-footprint continual adaptation with an external memory of key/value blocks."""

from typing import TYPE_CHECKING, Any

from .errors import (
    BundleError,
    CapacityError,
    ConfigError,
    FingerprintMismatch,
    InduceKVError,
    TaskDataError,
    UnknownBundle,
    UnknownFact,
    UnsupportedModel,
    VersionConflict,
)

if TYPE_CHECKING:
    from .frontend.offline import MemoryAnswer, MemoryLLM
    from .frontend.served_bundle import ServedBundle

__version__ = "0.2.0"

# The vLLM releases whose internals this plugin was written and tested against; checked when the plugin is registered.
SUPPORTED_VLLM = ">=0.32,<0.34"

__all__ = [
    "SUPPORTED_VLLM",
    "BundleError",
    "CapacityError",
    "ConfigError",
    "FingerprintMismatch",
    "InduceKVError",
    "MemoryAnswer",
    "MemoryLLM",
    "ServedBundle",
    "TaskDataError",
    "UnknownBundle",
    "UnknownFact",
    "UnsupportedModel",
    "VersionConflict",
    "__version__",
]


def __getattr__(name: str) -> Any:
    """What needs vLLM is imported when it is first used: bundles are made and read without."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .frontend import offline

    return getattr(offline, name)
