"""Whether runs that are to be compared differ in nothing but what is compared."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.continual.results import WHERE
from inducekv_vllm.errors import ConfigError


def require_same(one: Mapping[str, Any], other: Mapping[str, Any], which: str, but: str) -> None:
    """Configurations or settings; where a run found its files never matters.

    Args:
        which: what the two belong to, for the message.
        but: the key in which they may differ.

    Raises:
        ConfigError: naming a key in which they differ otherwise, and both values.
    """
    for name in sorted({*one, *other} - {but, WHERE}):
        if one.get(name) != other.get(name):
            raise ConfigError(
                f"{which} differ in {name}, not in {but} alone: {one.get(name)!r} and {other.get(name)!r}"
            )
