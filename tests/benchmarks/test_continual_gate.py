"""The gate's diagnostic, on a gate whose verdicts are known."""

import json

import pytest
import torch

from benchmarks.continual.diagnostics.__main__ import main
from benchmarks.continual.suites.demo import load
from inducekv_vllm.bundle import Bundle, EntryRecord, Gate
from selector.backbone.bundled_model import openings
from tests.benchmarks.finished_runs import write_configuration, write_finished_run
from tests.inducekv_vllm.bundles import d, random_bundle, random_gated_bundle

D_DEMO = 256  # the demo model's hidden size


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


@pytest.fixture(scope="module")
def suite_and_data(tmp_path_factory):
    data = tmp_path_factory.mktemp("data")
    sizes, base_sizes = {"train": 1, "validation": 1, "test": 3}, {"train": 9, "validation": 9, "test": 9}
    return load(data, sizes, base_sizes).ordered(["guild", "field"]), data


def demo_bundle(gate: Gate | None = None) -> Bundle:
    """An entry of each task for the demo model's hidden size; only its gate is looked at."""
    fingerprint = random_bundle().metadata.backbone.model_copy(update={"hidden_size": D_DEMO})
    entries = tuple(EntryRecord(id=task, task=task, source_digest="ab") for task in ("guild", "field"))
    keys = torch.nn.functional.one_hot(torch.tensor([0, 1]), D_DEMO).float()
    payload = torch.zeros(3, 2, 2, 4, 8)
    return random_bundle(
        2,
        retrieval_keys=keys,
        payload_keys=payload,
        payload_values=payload,
        backbone=fingerprint,
        entries=entries,
        weighting="prior",
        gate=gate,
    )


def test_a_gate_that_sends_everything_to_one_task_is_found_out(suite_and_data, tmp_path):
    suite, data = suite_and_data
    always = Gate(torch.zeros(2, 2, D_DEMO), torch.tensor([-1.0, 1.0]), ("guild", "field"))
    never = Gate(torch.zeros(2, 2, D_DEMO), torch.tensor([1.0, 1.0]), ("guild", "field"))
    rights = [{"guild": [True], "base": [True]}, {"guild": [True], "field": [True], "base": [True]}]
    write_configuration(tmp_path, suite)
    for seed, gate in enumerate((always, never)):
        write_finished_run(tmp_path, "refined", rights, seed=seed, bundles=[demo_bundle(gate)] * 2)
    assert main(["gate", "--out", str(tmp_path), "--data", str(data)]) == 0
    found = json.loads((tmp_path / "diagnostics" / "gate.json").read_bytes())
    assert found["opened"] == {
        "guild": {"opened": 0.5, "own_task": 0.5},
        "field": {"opened": 0.5, "own_task": 0.0},
        "base": {"opened": 0.5},
    }
    assert found["seeds"] == [0, 1]
    assert "sends 0.0% or more" in found["says"]
    assert (tmp_path / "diagnostics" / "gate.png").read_bytes().startswith(b"\x89PNG")


def test_a_memory_without_a_gate_is_refused(suite_and_data, tmp_path, capsys):
    rights = [{"guild": [True], "base": [True]}]
    write_configuration(tmp_path, suite_and_data[0])
    write_finished_run(tmp_path, "paper", rights, bundles=[demo_bundle()])
    assert main(["gate", "--method", "paper", "--out", str(tmp_path)]) == 2
    assert "the memory of paper has no relevance gate" in capsys.readouterr().err
