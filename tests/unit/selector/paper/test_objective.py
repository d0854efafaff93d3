"""Likelihood under weighted candidates: what enters it, and its gradients by finite differences."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from selector.backbone.extraction import extract, extract_keys
from selector.backbone.model import Backbone
from selector.backbone.scoring import Questions, Scorer
from selector.backbone.tiled_attention import tiled_attention
from selector.data.examples import Example
from selector.paper.calibration import Calibration, leaf
from selector.paper.candidate_pool import CandidatePool
from selector.paper.objective import Objective, log_prior
from tests.unit.selector.exact import in_float64

BUDGET, M = 3, 2


@pytest.fixture(scope="module")
def precise(model_folders: dict[str, Path]) -> Backbone:
    return in_float64(model_folders["llava"])


def make_objective(backbone: Backbone, examples: list[Example], dtype: torch.dtype = torch.float32) -> Objective:
    """Six candidates, three current examples, two anchors."""
    extraction = extract(backbone, examples[:6], M, payload_dtype=torch.float16)
    pool = CandidatePool.join(None, extraction, examples[:6])
    precise = {name: getattr(pool, name).to(dtype) for name in ("keys", "payload_keys", "payload_values")}
    return Objective(
        scorer=Scorer(backbone),
        pool=replace(pool, **precise),
        current=Questions(examples[:3], extraction.keys[:3].to(dtype)),
        anchors=Questions(examples[6:8], extract_keys(backbone, examples[6:8]).to(dtype)),
        budget=BUDGET,
        weighting="sqrt",
        batch_size=8,
        seed=0,
    )


def weights_of(objective: Objective) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return BUDGET * torch.randn(len(objective.pool), dtype=torch.float64, generator=generator).softmax(0)


def test_both_losses_are_differentiable_in_w_and_phi(precise: Backbone, examples: list[Example]) -> None:
    objective = make_objective(precise, examples, torch.float64)
    w, phi, h = weights_of(objective), Calibration(precise.num_layers).phi, 1e-6
    for loss in (objective.current_loss, objective.anchor_loss):
        variables = (leaf(w), leaf(phi))
        with tiled_attention(precise):
            by_w, by_phi = torch.autograd.grad(loss(*variables, (0,)), variables)
        for gradient, moved in ((by_w, lambda e: (w + e, phi)), (by_phi, lambda e: (w, phi + e))):
            direction = torch.randn(len(gradient), dtype=torch.float64, generator=torch.Generator().manual_seed(1))
            with torch.no_grad():
                rise = loss(*moved(h * direction), (0,)) - loss(*moved(-h * direction), (0,))
            assert float(gradient @ direction) == pytest.approx(float(rise) / (2 * h), rel=1e-4)


def test_weight_on_some_entries_only_is_the_memory_of_those_entries(llava: Backbone, examples: list[Example]) -> None:
    """pi = 0 is exact: under "prior" an entry without weight is not there."""
    objective = replace(make_objective(llava, examples), weighting="prior")
    phi = Calibration(llava.num_layers).phi
    chosen = torch.tensor([1, 2, 4])
    w = torch.zeros(6, dtype=torch.float64)
    w[chosen] = 1.0
    few = replace(objective, pool=objective.pool.take(chosen))
    found = objective.current_loss(w, phi, (0,))
    torch.testing.assert_close(found, few.current_loss(torch.ones(3).double(), phi, (0,)), rtol=1e-5, atol=1e-5)
    uniform = objective.current_loss(torch.full((6,), 0.5, dtype=torch.float64), phi, (0,))
    assert abs(float(found - uniform)) > 1e-3


def test_the_prior_is_exact_at_zero_and_its_gradient_is_no_nan() -> None:
    w = leaf(torch.tensor([0.0, 1.0, 2.0], dtype=torch.float64))
    prior = log_prior(w, 3)
    assert prior.tolist() == [-math.inf, math.log(1 / 3), math.log(2 / 3)]
    (gradient,) = torch.autograd.grad((prior.exp() * torch.tensor([5.0, 1, 1])).sum(), w)
    torch.testing.assert_close(gradient, torch.tensor([0, 1 / 3, 1 / 3], dtype=torch.float64))


def test_the_loss_is_summed_over_the_answer_and_its_end(llava: Backbone, examples: list[Example]) -> None:
    scorer = Scorer(llava)
    tokens = scorer.answer_tokens(examples[0])
    assert tokens[-1] == llava.processor.tokenizer.eos_token_id
    assert llava.processor.tokenizer.decode(tokens[:-1]) == examples[0].answer
    together = scorer.losses(examples[:3])
    alone = torch.cat([scorer.losses([example]) for example in examples[:3]])
    torch.testing.assert_close(together, alone, rtol=1e-5, atol=1e-5)
    questions = Questions(examples[:3], torch.zeros(3, llava.hidden_size))
    assert Scorer(llava, batch_size=2).mean_loss(questions) == pytest.approx(float(together.mean()), rel=1e-5)
