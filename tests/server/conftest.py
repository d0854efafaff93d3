"""The clients of the server that all HTTP tests share (tests/conftest.py)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

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


@pytest.fixture
def server_folder(server: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The server's own: its log, state and audit log."""
    (log,) = tmp_path_factory.getbasetemp().glob("server[0-9]*/server.log")
    return log.parent
