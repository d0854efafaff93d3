"""A version that shares entries with the one before answers as if it had been loaded alone."""

from __future__ import annotations

from pathlib import Path

import openai
import pytest

from inducekv_vllm.bundle import Bundle, write_bundle
from tests.inducekv_vllm.bundles import as_decoupled, remade
from tests.inducekv_vllm.parity import World, prompts
from tests.server.http import Bundles, ask, tokens_and_logprobs

REPLACED = (2, 7)  # rows of 12


def versions(world: World, form: str) -> tuple[Bundle, Bundle]:
    """Two memories of this server's tests alone; the later one has other payloads in two rows."""
    merged = remade(world.bundles["other"], payload_values=world.bundles["other"].payload_values * 1.0625)
    payload = {name: merged.tensors()[name].clone() for name in ("payload_keys", "payload_values")}
    for tensor in payload.values():
        tensor[:, list(REPLACED)] = tensor[:, list(REPLACED)].flip(1) * 0.875
    both = merged, remade(merged, **payload, value_gates=merged.value_gates * 0.5)
    return both if form == "merged" else (as_decoupled(both[0], "prompt"), as_decoupled(both[1], "prompt"))


@pytest.mark.parametrize("form", ["merged", "decoupled"])
def test_answers_are_those_of_a_fresh_load(
    form: str, world: World, bundles: Bundles, client: openai.OpenAI, tmp_path: Path
) -> None:
    for name, bundle in zip(("first", "later"), versions(world, form), strict=True):
        write_bundle(bundle, tmp_path / f"{name}.safetensors")

    def answers(salt: str) -> list[tuple[list[int], list[float]]]:
        """Computed anew: the salt keeps the prefix cache out."""
        found = []
        for top_k in (12, 3):
            extra = {"vllm_xargs": {"inducekv_top_k": top_k}, "cache_salt": salt}
            responses = [ask(client, "shared", each, extra_body=extra) for each in prompts(2, seed=57)]
            found += [tokens_and_logprobs(response) for response in responses]
        return found

    with bundles.loaded("shared", tmp_path / "later.safetensors"):
        assert bundles.cards()["shared"]["shared_entries"] == 0
        alone = answers("alone")
    with bundles.loaded("shared", tmp_path / "first.safetensors"):
        assert answers("first") != alone
        response = bundles.load("shared", tmp_path / "later.safetensors", replace=True)
        assert response.status_code == 200, response.text
        assert response.json()["shared_entries"] == 12 - len(REPLACED)
        assert answers("beside") == alone
        bundles.wait_until_drained()
        assert answers("after") == alone
        # A rollback shares what the later version has kept.
        assert bundles.load("shared", tmp_path / "first.safetensors", replace=True).json()["shared_entries"] == 10
