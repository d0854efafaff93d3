"""The published suites by name."""

from __future__ import annotations

from collections.abc import Mapping

from inducekv_vllm.errors import ConfigError

from .layout import PublishedSuite, Task
from .llava import COIN, UCIT, VQA10
from .others import DOMAIN, LIIT
from .vqacl import NEXT_QA, VQACL

SUITES: Mapping[str, PublishedSuite] = {
    suite.name: suite for suite in (UCIT, COIN, VQA10, VQACL, NEXT_QA, DOMAIN, LIIT)
}

__all__ = ["SUITES", "PublishedSuite", "Task", "published_suite"]


def published_suite(name: str) -> PublishedSuite:
    """Raises ConfigError: there is none of that name."""
    if name not in SUITES:
        raise ConfigError(f"there is no published suite {name!r}, there are: {', '.join(SUITES)}")
    return SUITES[name]
