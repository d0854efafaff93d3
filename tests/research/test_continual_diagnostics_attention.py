"""Attention on memory against softmax weights that are written out in full."""

import math

import pytest
import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from benchmarks.research.continual.diagnostics.memory_attention import memory_masses, recorded_masses
from inducekv_vllm.bundle import Bundle
from selector.backbone.generation import score
from selector.backbone.injection import TensorMemory, attend_decoupled, attention_with
from selector.backbone.model import Backbone, attention_named
from selector.backbone.scoring import Scorer
from selector.update.build import build_bundle
from selector.update.settings import BuildSettings
from tests.research.finished_runs import diagnose, write_configuration, write_finished_run

SETTINGS = [("sqrt", {}), ("sqrt", {"top_k": 2, "remainder": True}), ("prior", {"top_k": 2})]


@pytest.fixture(scope="module")
def suite(demo_suite):
    return demo_suite(4, 1, 3, "guild", "field")[1]


def bundle_of(backbone, suite, weighting="sqrt") -> Bundle:
    examples = [example for task in suite.tasks for example in task.train[:2]]
    return build_bundle(backbone, examples, BuildSettings(budget=4, payload_tokens=3, weighting=weighting))


def dense_masses(backbone, prompts, answers, memory, terms) -> list[torch.Tensor]:
    """Each layer's [n, T, H] from one softmax over all memory tokens, the remainder and the request's own tokens."""
    masses = []

    def attend(query, key, value, visible, scaling, memory, terms, layer):
        n, H, T, D = query.shape
        J, m = key.shape[1], memory.payload_keys.shape[3]
        output, mass = torch.zeros(n, T, H, D), torch.zeros(n, T, H)
        for row in range(n):
            for head in range(H):
                of = head // (H // J)
                scale = terms.key_scale[row].repeat_interleave(m)[:, None]
                keys = memory.payload_keys[layer, :, of].flatten(0, 1) * scale  # [B m, D]
                values = memory.payload_values[layer, :, of].flatten(0, 1)
                values = values * terms.value_scale[row].repeat_interleave(m)[:, None] * memory.value_gates[layer]
                logits = query[row, head] @ torch.cat([keys, key[row, of]]).T * scaling  # [T, B m + S]
                logits[:, : len(keys)] += terms.log_weight[row].repeat_interleave(m) + memory.layer_bias[layer]
                logits[:, len(keys) :].masked_fill_(~visible[row % len(visible)], -math.inf)
                remainder = (terms.log_remainder[row] + memory.layer_bias[layer]).expand(T, 1)
                share = torch.cat([remainder, logits], dim=1).softmax(dim=1)
                mass[row, :, head] = share[:, : 1 + len(keys)].sum(dim=1)
                output[row, :, head] = share[:, 1:] @ torch.cat([values, value[row, of]])
        masses.append(mass)
        return output

    AttentionInterface.register("dense_test", attention_with(attend, attend_decoupled))
    AttentionMaskInterface.register("dense_test", sdpa_mask)
    with attention_named(backbone, "dense_test"):
        score(backbone, prompts, answers, memory, terms)
    return masses


@pytest.mark.parametrize(("weighting", "settings"), SETTINGS)
def test_masses_are_those_of_dense_softmax_weights(backbone, suite, weighting, settings):
    memory = TensorMemory.from_bundle(bundle_of(backbone, suite, weighting))
    memory = TensorMemory(**{**vars(memory), "layer_bias": torch.linspace(-1, 1, backbone.num_layers)})
    prompts = [backbone.encode_example(task.test[0]) for task in suite.tasks]
    keys = torch.cat([backbone.retrieval_keys(prompt) for prompt in prompts])
    terms, answers = memory.terms(keys, **settings), [[7, 8], [9]]
    plain = score(backbone, prompts, answers, memory, terms)
    with recorded_masses(backbone) as masses:
        recording = score(backbone, prompts, answers, memory, terms)
    expected = dense_masses(backbone, prompts, answers, memory, terms)
    assert len(masses) == len(expected) == backbone.num_layers
    for found, dense in zip(masses, expected, strict=True):
        assert dense.max() - dense.min() > 0.1
        torch.testing.assert_close(found, dense, rtol=0, atol=2e-5)
    for one, other in zip(plain, recording, strict=True):  # recording changes nothing
        torch.testing.assert_close(one, other)


def test_queries_of_zero_share_attention_evenly(model, backbone, suite):
    """2 entries x 3 tokens against the t + 1 tokens that position t sees: the mass is 6 / (6 + t + 1)."""
    bundle = build_bundle(backbone, suite.tasks[0].train[:2], BuildSettings(budget=2, payload_tokens=3))
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
