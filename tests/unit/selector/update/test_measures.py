"""Measures of a memory, against what they are by hand."""

import pytest

from benchmarks.lora_adapter import gate_bytes
from inducekv_vllm.backbone.footprint import prototypes_of
from inducekv_vllm.bundle import FactRecord
from selector.update.measures import entry_bytes, memory_bytes
from tests.bundles import random_gate, random_gated_bundle


@pytest.mark.parametrize("num_tasks", [1, 7])
def test_a_gate_takes_as_many_bytes_as_its_size_says(num_tasks: int) -> None:
    tasks = [*"ab", *(str(number) for number in range(num_tasks))][:num_tasks]
    gate = random_gate(tasks=tasks, num_prototypes=prototypes_of(num_tasks))
    stored = sum(tensor.nbytes for tensor in gate.tensors().values())
    half = 2 * gate.prototypes.numel()  # of what is float32 here and float16 in a bundle
    assert gate_bytes(num_tasks, gate.center.shape[1]) == stored - half
    assert gate_bytes(0, 16) == 0
    bundle = random_gated_bundle()
    assert memory_bytes(bundle) - entry_bytes(bundle) == sum(
        tensor.nbytes for name, tensor in bundle.tensors().items() if name.startswith("gate_")
    )


def test_facts_count() -> None:
    bundle = random_gated_bundle()
    fact = FactRecord(id="f", task="c", source_digest="cd", question="Who keeps the mill?", answer="Zoë")
    assert memory_bytes(bundle.next(facts=(fact,))) == memory_bytes(bundle) + len(fact.model_dump_json().encode())
