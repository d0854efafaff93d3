"""Memory is taught to a hybrid's layers with attention, through layers that keep a state."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from inducekv_vllm.backbone.turns import turn_marks
from selector.backbone.injection import TensorMemory, Terms
from selector.backbone.model import Backbone
from selector.backbone.scoring import Scorer
from selector.backbone.token_values import asked_texts, token_values
from selector.data.examples import Example, read_task
from tests.task_data import QUESTIONS, record, write_task
from tests.tiny_hybrids import save_granite_hybrid, save_lfm2, save_qwen3_5
from tests.unit.selector.backbone.memories import PAYLOADS, decoupled_memory, gradients, losses_of_whole


@pytest.fixture(scope="module", params=[save_qwen3_5, save_granite_hybrid, save_lfm2], ids=lambda save: save.__name__)
def hybrid(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Backbone:
    return Backbone.load(request.param(tmp_path_factory.mktemp("hybrid")))


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> list[Example]:
    lines = [record(row, messages=[{"role": "user", "content": text}]) for row, text in enumerate(QUESTIONS)]
    return read_task(write_task(tmp_path_factory.mktemp("texts"), lines, num_pictures=1))


def from_position(scorer: Scorer, texts: list[Example], memory: TensorMemory, part: float) -> Terms:
    """Terms of a memory that acts from this part of each prompt on; 1: from its last token on."""
    prompts = [scorer.prefix(example) for example in texts]
    keys = torch.cat([scorer.backbone.retrieval_keys(prompt) for prompt in prompts])
    positions = [int(part * (prompt["input_ids"].shape[1] - 1)) for prompt in prompts]
    return replace(memory.terms(keys), first_active=torch.tensor(positions))


@pytest.mark.parametrize("part", [0, 0.5, 1])
def test_memory_that_acts_late_is_scored_on_whole_prompts(hybrid: Backbone, texts: list[Example], part: float) -> None:
    scorer, memory = Scorer(hybrid), decoupled_memory(hybrid)
    for name in PAYLOADS:
        getattr(memory, name).requires_grad_()
    terms = from_position(scorer, texts, memory, part)
    whole = losses_of_whole(scorer, texts, memory, terms)
    for _ in range(2):  # computed, and from the cache
        in_tails = scorer.losses(texts, memory, terms)
        torch.testing.assert_close(in_tails, whole, rtol=0, atol=2e-4)
    assert scorer.exact_tails == ({} if part else {(False, False): True})
    for mine, expected in zip(gradients(in_tails, memory), gradients(whole, memory), strict=True):
        assert expected.abs().max() > 0
        torch.testing.assert_close(mine, expected, rtol=1e-3, atol=1e-4 * float(expected.abs().max()))


def test_gradients_are_those_of_a_small_step(hybrid: Backbone, texts: list[Example]) -> None:
    scorer, memory = Scorer(hybrid), decoupled_memory(hybrid)
    terms, values = from_position(scorer, texts, memory, 0.5), memory.payload_values.requires_grad_()
    (gradient,) = torch.autograd.grad(losses_of_whole(scorer, texts, memory, terms).sum(), [values])
    step = 0.02 * gradient / gradient.norm()
    with torch.no_grad():
        up, down = (
            losses_of_whole(scorer, texts, replace(memory, payload_values=values + sign * step), terms).sum()
            for sign in (1, -1)
        )
    assert float(up - down) / 0.04 == pytest.approx(float(gradient.norm()), rel=0.05)


def test_what_a_gate_sees_is_that_of_the_layers_with_attention(hybrid: Backbone, texts: list[Example]) -> None:
    """Prompts that begin alike are computed whole: a state is not kept of what they begin with."""
    marks, encoded = turn_marks(hybrid.processor), [hybrid.encode_example(example) for example in texts]
    kept: list[Tensor] = []
    handle = hybrid.attention_layers()[1].v_proj.register_forward_hook(lambda *args: kept.append(args[-1]))
    hybrid.hidden_states(encoded[0])
    handle.remove()
    alone, *_ = token_values(hybrid, encoded, [0, 1], marks)  # [t, S, F]
    asked = asked_texts(hybrid, encoded, [1], marks, ())
    of_text = len(hybrid.tokenizer(asked.texts[0], add_special_tokens=False)["input_ids"])
    assert alone.shape[1:] == (2, hybrid.num_kv_heads * hybrid.head_dim)
    mean = asked.means[0]
    assert mean is not None
    assert of_text > 1
    assert any(
        torch.allclose(mean[0], kept[0][0, at : at + of_text].float().mean(0), atol=1e-4)
        for at in range(kept[0].shape[1])
    )
