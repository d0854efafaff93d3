"""Variants of a memory against terms and rotations that are written out, and the whole command."""

import math
from dataclasses import replace

import pytest
import torch
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from benchmarks.continual.diagnostics.parts import LEARNED, UNTOUCHED, VARIANTS, before_the_prompt, by_variant
from selector.backbone.generation import score
from selector.backbone.injection import Memory, Terms
from selector.backbone.loading import decoder
from selector.backbone.scoring import Scorer
from selector.update.build import build_bundle
from selector.update.settings import BuildSettings
from tests.benchmarks.finished_runs import diagnose, write_configuration, write_finished_run
from tests.benchmarks.small_streams import gated
from tests.inducekv_vllm.bundles import decided_gate


@pytest.fixture(scope="module")
def suite(demo_suite):
    return demo_suite(4, 1, 3, "guild", "field")[1]


@pytest.fixture
def bundle(backbone, suite):
    examples = [example for task in suite.tasks for example in task.train[:2]]
    return build_bundle(backbone, examples, BuildSettings(budget=4, payload_tokens=3, weighting="sqrt"))


def nll(backbone, example, memory=None, terms=None) -> float:
    answer = Scorer(backbone).answer_tokens(example)
    (logprobs,) = score(backbone, [Scorer(backbone).prefix(example)], [answer], memory, terms)
    return -float(logprobs.sum())


def queries(backbone, examples) -> torch.Tensor:
    return torch.cat([backbone.retrieval_keys(backbone.encode_example(example)) for example in examples])


def test_variants_are_the_terms_that_their_names_say(backbone, suite, bundle):
    (example,) = suite.tasks[0].test[:1]
    keys, memory = queries(backbone, [example]), Memory.from_bundle(bundle)
    found = by_variant(backbone, bundle, [example], keys)
    assert [*found] == [UNTOUCHED, *VARIANTS]
    assert found.pop("gates 0.5") == found[LEARNED]  # which is where gates start
    assert found.pop("gates 1.0") == found["values in full"]  # twice the values, of 4 entries
    assert len({round(value, 5) for value, _ in found.values()}) == len(found)  # each changes something

    def with_alpha(alpha: torch.Tensor, memory=memory, keys: float = 1.0, values: float = 1.0) -> float:
        scale, chosen = alpha.sqrt(), torch.where(alpha > 0, 0.0, -math.inf)
        terms = Terms(scale * keys, chosen, scale * values, torch.tensor([-math.inf]))
        return nll(backbone, example, memory, terms)

    scores = keys @ memory.retrieval_keys.T  # [1, 4]
    nearest = torch.zeros(1, 4).index_fill(1, scores.argmax(dim=1), 1.0)
    learned = (scores / memory.temperature).softmax(dim=1)
    constant = torch.stack([of_layer.transpose(0, 1).flatten(1, 2).mean(1) for of_layer in memory.payload_values])
    without_content = replace(
        memory, payload_values=constant[:, None, :, None].expand_as(memory.payload_values)
    )  # [L, 1, J, 1, D]
    expected = {
        UNTOUCHED: nll(backbone, example),
        LEARNED: with_alpha(learned),
        "keys in full": with_alpha(learned, keys=2.0),
        "values in full": with_alpha(learned, values=2.0),
        "mean values": with_alpha(learned, without_content),
        "nearest": with_alpha(nearest),
        "uniform": with_alpha(torch.full((1, 4), 0.25)),
        "temperature 0.2": with_alpha((scores / 0.2).softmax(dim=1)),
    }
    assert {name: found[name][0] for name in expected} == pytest.approx(expected, abs=1e-4)


def test_a_question_behind_a_closed_gate_is_answered_without_memory(backbone, suite, bundle):
    examples = suite.tasks[0].test[:1]
    closed = gated(
        build_bundle(backbone, suite.tasks[0].train[:2], BuildSettings(budget=2, payload_tokens=3, weighting="prior")),
        decided_gate(None, backbone.fingerprint, ("guild",)),
    )
    found = by_variant(backbone, closed, examples, queries(backbone, examples))
    assert set(found.values()) == {found[UNTOUCHED]}


def test_memory_before_the_prompt_is_seen_as_from_the_next_positions(backbone, bundle):
    memory, m = Memory.from_bundle(bundle), 3
    moved = before_the_prompt(backbone, memory).payload_keys[0, 0, 0]  # [m, D]
    rotate = decoder(backbone.model).rotary_emb
    query = torch.randn(1, 1, 1, backbone.head_dim, generator=torch.Generator().manual_seed(0))
    for row in range(m):
        distance = m - row  # from the token to a query at position 0
        turned, _ = apply_rotary_pos_emb(query, query, *rotate(query, torch.tensor([[distance]])))
        expected = turned[0, 0, 0] @ memory.payload_keys[0, 0, 0, row]
        torch.testing.assert_close(query[0, 0, 0] @ moved[row], expected, rtol=0, atol=1e-4)


def test_the_command_writes_a_row_for_each_task_and_variant(demo_backbone, demo_suite, suite, tmp_path):
    examples = [example for task in suite.tasks for example in task.train[:2]]
    bundle = build_bundle(demo_backbone, examples, BuildSettings(budget=4, payload_tokens=3, weighting="sqrt"))
    write_configuration(tmp_path, *demo_suite(4, 1, 3, "guild", "field"))
    base = {"base": [True] * 9}
    rights = [{"guild": [True] * 3, **base}, {"guild": [True] * 3, "field": [True] * 3, **base}]
    write_finished_run(tmp_path, "paper", rights, suite=suite, bundles=[bundle, bundle])
    found = diagnose("parts", tmp_path, "--limit", 2)
    assert [(row["task"], row["variant"]) for row in found["rows"]] == [
        (task, variant) for task in ("guild", "field") for variant in (UNTOUCHED, *VARIANTS)
    ]
    expected = by_variant(
        demo_backbone, bundle, suite.tasks[1].test[:2], queries(demo_backbone, suite.tasks[1].test[:2])
    )
    of_field = {row["variant"]: row["nll"] for row in found["rows"] if row["task"] == "field"}
    assert of_field == pytest.approx({name: value for name, (value, _) in expected.items()}, abs=1e-3)
    assert found["finding"].startswith("Answers have an NLL of ")
