"""Tails: scoring from the first active position on equals scoring the whole prompt, in values and gradients."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from inducekv_vllm.bundle.activation import ACTIVATIONS
from selector.backbone import tails
from selector.backbone.injection import TensorMemory, Terms
from selector.backbone.model import Backbone
from selector.backbone.scoring import Scorer
from selector.data.examples import Example, read_task
from tests.unit.selector.backbone.memories import PAYLOADS, decoupled_memory, gradients, losses_of_whole


@pytest.fixture(scope="module")
def examples(task_file: Path) -> list[Example]:
    return read_task(task_file)[:4]


def late(scorer: Scorer, examples: list[Example], memory: TensorMemory, activation: str) -> Terms:
    keys = torch.cat([scorer.backbone.retrieval_keys(scorer.prefix(example)) for example in examples])
    first_active = scorer.first_active(examples, [activation] * len(examples))  # type: ignore[list-item]
    return replace(memory.terms(keys), first_active=first_active)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_tails_give_what_whole_prompts_give(backbone: Backbone, examples: list[Example], activation: str) -> None:
    scorer, memory = Scorer(backbone), decoupled_memory(backbone)
    for name in PAYLOADS:
        getattr(memory, name).requires_grad_()
    terms = late(scorer, examples, memory, activation)
    lengths = {scorer.prefix(example)["input_ids"].shape[1] for example in examples}
    assert len(lengths) > 1  # padding is tested too
    whole = losses_of_whole(scorer, examples, memory, terms)
    for _ in range(2):  # computed, and from the cache
        in_tails = scorer.losses(examples, memory, terms)
        torch.testing.assert_close(in_tails, whole, rtol=0, atol=1e-4)
    # Qwen3-VL gives pictures to several layers, so its whole prompts do not start from the first layer's input.
    exact = activation != "prompt" or "Qwen3VL" not in type(backbone.model).__name__
    assert scorer.exact_tails == {(activation != "prompt", True): exact}
    for mine, expected in zip(gradients(in_tails, memory), gradients(whole, memory), strict=True):
        assert expected.abs().max() > 0
        torch.testing.assert_close(mine, expected, rtol=1e-3, atol=1e-5 * float(expected.abs().max()))


def test_only_tails_are_computed_in_a_step(
    backbone: Backbone, examples: list[Example], monkeypatch: pytest.MonkeyPatch
) -> None:
    scorer, memory = Scorer(backbone), decoupled_memory(backbone)
    terms = late(scorer, examples, memory, "generation")
    expected = scorer.losses(examples, memory, terms)
    monkeypatch.setattr(backbone.model, "forward", None)
    torch.testing.assert_close(scorer.losses(examples, memory, terms), expected)
    with pytest.raises(TypeError):  # memory that acts from the start needs the whole prompt
        scorer.losses(examples, memory, late(scorer, examples, memory, "prompt"))


def test_a_model_of_another_build_is_scored_whole(
    backbone: Backbone, examples: list[Example], monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, scorer = decoupled_memory(backbone), Scorer(backbone)
    terms = late(scorer, examples, memory, "text")
    expected = scorer.losses(examples, memory, terms)
    exact = tails.tail_logprobs
    monkeypatch.setattr(tails, "tail_logprobs", lambda *args: [logprobs.roll(1) for logprobs in exact(*args)])
    other = Scorer(backbone)
    torch.testing.assert_close(other.losses(examples, memory, terms), expected, rtol=0, atol=1e-4)
    assert other.exact_tails == {(True, True): False}
