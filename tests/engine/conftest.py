"""Streams are made as for the benchmarks' own tests."""

from __future__ import annotations

from tests.unit.benchmarks.conftest import data, demo_suite  # noqa: F401 - fixtures
