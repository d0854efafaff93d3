"""How much of its attention a model gives to a memory: with queries of zero, by hand, and through the command."""

import pytest
import torch

from benchmarks.research.continual.diagnostics.memory_attention import memory_masses
from inducekv_vllm.bundle import Bundle
from selector.backbone.model import Backbone
from selector.backbone.scoring import Scorer
from tests.research.extracted import extracted_bundle
from tests.research.finished_runs import diagnose, write_configuration, write_finished_run


@pytest.fixture(scope="module")
def suite(demo_suite):
    return demo_suite(4, 1, 3, "guild", "field")[1]


def bundle_of(backbone, suite, weighting="sqrt") -> Bundle:
    examples = [example for task in suite.tasks for example in task.train[:2]]
    return extracted_bundle(backbone, examples, payload_tokens=3, weighting=weighting)


def test_queries_of_zero_share_attention_evenly(model, backbone, suite):
    """2 entries x 3 tokens against the t + 1 tokens that position t sees: the mass is 6 / (6 + t + 1)."""
    bundle = extracted_bundle(backbone, suite.tasks[0].train[:2], payload_tokens=3)
    example = suite.tasks[0].test[0]
    blind = Backbone.load(model)
    for layer in blind.attention_layers():
        torch.nn.init.zeros_(layer.q_proj.weight)
    prompt = blind.encode_example(example)
    keys = blind.retrieval_keys(prompt)
    answer = "north"
    length = prompt["input_ids"].shape[1] + len(blind.processor.tokenizer(answer)["input_ids"])
    expected = sum(6 / (6 + t + 1) for t in range(length)) / length
    # Beside a longer request, whose length is the batch's: padding is not counted.
    longer = "north north north north north"
    found = memory_masses(blind, bundle, [example, example], [answer, longer], keys.expand(2, -1))
    torch.testing.assert_close(found[0], torch.full((blind.num_layers,), expected).double(), rtol=0, atol=1e-6)
    assert (found[1] < found[0]).all()


def test_the_command_writes_rows_of_masses_and_gains(demo_backbone, demo_suite, suite, tmp_path):
    bundle, base = bundle_of(demo_backbone, suite, "prior"), [True] * 9
    write_configuration(tmp_path, *demo_suite(4, 1, 3, "guild", "field"))
    memory = [
        {"guild": [True, True, True], "base": base},
        {"guild": [True, True, False], "field": [True, False, False], "base": [False, *base[1:]]},
    ]
    plain = [{"guild": [False] * 3, "base": base}, {"guild": [False] * 3, "field": [False] * 3, "base": base}]
    write_finished_run(tmp_path, "refined", memory, suite=suite, bundles=[bundle, bundle])
    write_finished_run(tmp_path, "no_memory", plain, suite=suite)
    found = diagnose("memory_attention", tmp_path, "--limit", 2)
    guild, field, of_base = found["rows"]
    assert [row["task"] for row in found["rows"]] == ["guild", "field", "base"]
    assert [guild["gain"], field["gain"], of_base["gain"]] == pytest.approx([2 / 3, 1 / 3, -1 / 9], abs=1e-5)
    assert [guild["normalised_gain"], field["normalised_gain"]] == pytest.approx([1, 0], abs=1e-5)
    assert of_base["normalised_gain"] is None
    examples = suite.tasks[0].test[:2]
    keys = torch.cat([demo_backbone.retrieval_keys(Scorer(demo_backbone).prefix(example)) for example in examples])
    expected = memory_masses(demo_backbone, bundle, examples, [e.answer for e in examples], keys).mean(dim=0)
    assert guild["mass"] == pytest.approx(expected.tolist(), abs=1e-5)
    assert found["questions"] == {"guild": 2, "field": 2, "base": 2}
