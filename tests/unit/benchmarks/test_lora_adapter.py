"""A gate takes as many bytes as its size says, where adapters get as many as a memory."""

from __future__ import annotations

import pytest

from benchmarks.lora_adapter import gate_bytes
from inducekv_vllm.backbone.footprint import prototypes_of
from tests.bundles import random_gate


@pytest.mark.parametrize("num_tasks", [1, 7])
def test_a_gate_takes_as_many_bytes_as_its_size_says(num_tasks: int) -> None:
    tasks = [*"ab", *(str(number) for number in range(num_tasks))][:num_tasks]
    gate = random_gate(tasks=tasks, num_prototypes=prototypes_of(num_tasks))
    stored = sum(tensor.nbytes for tensor in gate.tensors().values())
    half = 2 * gate.prototypes.numel()  # of what is float32 here and float16 in a bundle
    assert gate_bytes(num_tasks, gate.center.shape[1]) == stored - half
    assert gate_bytes(0, 16) == 0
