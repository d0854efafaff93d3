"""The clients of the server that all HTTP tests share (tests/conftest.py)."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from tests.server.http import Bundles


@pytest.fixture
def client(server: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server}/v1", api_key="none", max_retries=0, timeout=300) as client:
        yield client


@pytest.fixture(scope="session")
def bundles(server: str) -> Bundles:
    return Bundles(server)
