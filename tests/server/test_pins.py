"""Names of bundles, and names pinned to a version, in vLLM's table of adapters."""

import pytest
from vllm.lora.request import LoRARequest

from inducekv_vllm.frontend.memory_engine import MemoryRequest
from server.names import ServedNames
from server.state import Served
from server.versions import unpinned

DIGEST = "0123456789abcdef" * 4


class State:
    """It has one name."""

    def find(self, name: str) -> Served | None:
        return Served(DIGEST, None, None) if name == "m" else None


@pytest.fixture
def names() -> ServedNames:
    adapter = LoRARequest(lora_name="style", lora_int_id=1, lora_path=f"{DIGEST}")
    return ServedNames({"style": adapter}, State(), "base")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "model", [f"m@{DIGEST[:11]}", f"m@{'f' * 64}", f"style@{DIGEST}", f"n@{DIGEST}", f"m@{DIGEST}0", "m@", "@", "n"]
)
def test_others_are_not_there(names: ServedNames, model: str) -> None:
    assert model not in names
    assert names.get(model) is None
    with pytest.raises(KeyError):
        names[model]


@pytest.mark.parametrize("model", ["m", f"m@{DIGEST}", f"m@{DIGEST[:12]}"])
def test_a_bundle_is_found_and_not_listed(names: ServedNames, model: str) -> None:
    found = names[model]
    assert isinstance(found, MemoryRequest)
    assert (found.lora_name, found.lora_path, found.base_model_name) == (model, DIGEST, "base")
    assert found == names.get(model)
    assert model in names
    assert list(names) == ["style"]


def test_a_name_without_a_digest_is_not_pinned() -> None:
    assert unpinned("m") == ("m", "")
    assert unpinned("a/b@c") == ("a/b@c", "")
    assert unpinned(f"a@b@{DIGEST}") == ("a@b", DIGEST)
