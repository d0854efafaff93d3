"""A tiny model that documents are compacted for."""

from __future__ import annotations

from pathlib import Path

import pytest

from selector.backbone.model import Backbone
from tests.tiny_models import save_tiny_llama


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("model") / "llama")


@pytest.fixture(scope="module")
def llama(folder: Path) -> Backbone:
    return Backbone.load(folder)
