"""Every error a user of InduceKV can cause, in one tree.

    InduceKVError(ValueError)
    ├── BundleError            a bundle file or its content is not usable
    │   └── FingerprintMismatch    the bundle was made for another backbone
    ├── TaskDataError          task data (JSONL, LLaVA JSON, images) cannot be read
    ├── UnsupportedModel       the model has an architecture or a feature InduceKV cannot serve
    ├── ConfigError            a setting is unknown, out of range, or contradicts another
    ├── UnknownBundle          no bundle of that name is loaded
    └── CapacityError          a request or a bundle does not fit into the resources it was given

All are `ValueError`s, so callers that only know vLLM or the standard library treat them as bad input, not as a crash.
"""


class InduceKVError(ValueError):
    """Base of all errors raised for bad input."""


class BundleError(InduceKVError):
    """A bundle is missing, damaged or inconsistent; the message names the file and the problem."""


class FingerprintMismatch(BundleError):
    """A bundle was extracted from a different backbone; the message lists every difference."""


class TaskDataError(InduceKVError):
    """Task data cannot be read; the message names the file and, where there is one, the line."""


class UnsupportedModel(InduceKVError):
    """A model, or a feature it was started with, cannot be combined with a memory."""


class ConfigError(InduceKVError):
    """A setting is unknown, out of range, or contradicts another one."""


class UnknownBundle(InduceKVError):
    """No bundle of this name is loaded."""


class CapacityError(InduceKVError):
    """Something does not fit: a bundle into the pool, or a request into the slots."""
