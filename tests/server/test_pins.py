"""Names that are pinned to a version, in vLLM's table of adapters."""

from __future__ import annotations

import pytest
from vllm.lora.request import LoRARequest

from inducekv_vllm.frontend.memory_engine import MemoryRequest
from server.names import ServedNames, unpinned

DIGEST = "0123456789abcdef" * 4


@pytest.fixture
def names() -> ServedNames:
    adapter = LoRARequest(lora_name="style", lora_int_id=1, lora_path=f"{DIGEST}")
    memory = MemoryRequest(lora_name="m", lora_int_id=2, lora_path=DIGEST, base_model_name="base")
    return ServedNames({"style": adapter, "m": memory})


@pytest.mark.parametrize(
    "model", [f"m@{DIGEST[:11]}", f"m@{'f' * 64}", f"style@{DIGEST}", f"n@{DIGEST}", f"m@{DIGEST}0", "m@", "@", "n"]
)
def test_others_are_not_there(names: ServedNames, model: str) -> None:
    assert model not in names
    assert names.get(model) is None
    with pytest.raises(KeyError):
        names[model]


def test_a_name_without_a_digest_is_not_pinned(names: ServedNames) -> None:
    assert names["m"] is names.get("m")
    assert unpinned("m") == ("m", "")
    assert unpinned("a/b@c") == ("a/b@c", "")
    assert unpinned(f"a@b@{DIGEST}") == ("a@b", DIGEST)
