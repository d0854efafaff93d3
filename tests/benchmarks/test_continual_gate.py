"""The gate's diagnostic, on a gate whose verdicts are known."""

import pytest
import torch

from benchmarks.continual.diagnostics.gate import measure
from inducekv_vllm.bundle import Gate
from inducekv_vllm.errors import ConfigError
from selector.deployed import openings
from tests.inducekv_vllm.bundles import d, random_gated_bundle


def test_shares_of_a_gate_that_lets_two_of_four_questions_in_one_to_each_task():
    keys = torch.zeros(2, 2, d)
    keys[0, 1, 0] = keys[1, 1, 1] = 1.0  # each task has a direction of its own in the text part
    bundle = random_gated_bundle(gate=Gate(keys, torch.tensor([0.5, 0.5]), ("a", "b")))
    queries = torch.zeros(4, 2, d)
    queries[0, 1, 0] = queries[1, 1, 1] = 1.0
    assert openings(bundle, "a", queries) == {"opened": 0.5, "own_task": 0.25}
    assert openings(bundle, "b", queries) == {"opened": 0.5, "own_task": 0.25}
    assert openings(bundle, "a", queries[:1]) == {"opened": 1.0, "own_task": 1.0}
    assert openings(bundle, "unknown", queries) == {"opened": 0.5, "own_task": 0.0}


def test_a_run_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="no run of refined with budget 32"):
        measure(tmp_path, None, tmp_path, "refined", 32)
