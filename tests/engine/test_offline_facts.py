"""`MemoryLLM.forget` takes a list of ids: a string, whose letters could be ids, is refused before anything is read."""

from pathlib import Path
from typing import Any

import pytest

from inducekv_vllm import MemoryLLM
from inducekv_vllm.errors import ConfigError


def test_a_string_is_no_list_of_ids(tmp_path: Path) -> None:
    memories, nothing = object.__new__(MemoryLLM), Any
    with pytest.raises(ConfigError, match="expected a list of ids, found the string '12': its letters would be"):
        memories.forget("12", tmp_path / "b.safetensors", nothing)  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []
