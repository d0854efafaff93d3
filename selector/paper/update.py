"""One task's update by the paper's recipe (Algorithm 1), from examples to the next bundle.

Shapes: N candidates, B budget, d hidden size.
"""

import itertools
from collections.abc import Sequence
from typing import Final

import torch

from inducekv_vllm.bundle import Bundle, facts_of
from inducekv_vllm.errors import ConfigError

from ..backbone.extraction import Extraction, extract, extract_keys
from ..backbone.injection import TensorMemory
from ..backbone.model import Backbone
from ..backbone.scoring import EVALUATION_BATCHES, Questions, Scorer
from ..backbone.tiled_attention import tiled_attention
from ..data.choice import some_rows
from ..data.examples import Example
from ..runtime.progress import progress_bar
from ..runtime.running import ALONE, Run
from ..update.coverage import Coverage
from ..update.inputs import TaskInputs, check_fit
from ..update.result import UpdateResult
from ..update.settings import PAPER
from .bilevel import SelectionProblem, SelectionResult, SelectionState, select
from .calibration import Calibration
from .candidate_pool import CandidatePool
from .objective import Objective
from .report import report_update
from .settings import PaperSettings
from .shortlist import QUERIES, nearest

# The grid of the paper's "Implementation Details", searched on the first task.
BETAS: Final = (0.1, 0.3, 0.5, 1.0)
GAMMAS: Final = (0.0, 0.05, 0.1, 0.3)


def update_paper(backbone: Backbone, inputs: TaskInputs, settings: PaperSettings, run: Run = ALONE) -> UpdateResult:
    """Select the next memory. Raises as `Recipe.update` does."""
    scorer, pairs = Scorer(backbone, batch_size=EVALUATION_BATCHES * settings.batch_size), grid(inputs, settings)
    check_model(scorer, inputs, settings, run.progress)
    extraction = extract(
        backbone,
        inputs.training,
        settings.payload_tokens,
        batch_size=settings.batch_size,
        payload_dtype=torch.float16,
        progress=run.progress,
    )
    validation = _questions(backbone, inputs.validation, settings, run.progress)
    anchors = _questions(backbone, inputs.anchors, settings, run.progress)
    objective = Objective(
        scorer=scorer,
        pool=_candidate_pool(inputs, extraction, settings),
        current=Questions(inputs.training, extraction.keys),
        anchors=anchors,
        budget=settings.budget,
        weighting=settings.weighting,
        batch_size=settings.batch_size,
        seed=settings.seed,
    )
    results = _select_all(inputs, objective, validation, settings, pairs, run)
    best = min(results, key=lambda result: result.validation_loss or 0.0)  # on a tie, the first of the grid
    with tiled_attention(backbone):
        report = report_update(inputs, objective, validation, results, best)
    return UpdateResult(best.bundle, report)


def check_model(scorer: Scorer, inputs: TaskInputs, settings: PaperSettings, progress: bool = False) -> None:
    """The checks that need the model. Raises as `Recipe.update` does."""
    scorer.backbone.require_full_attention()
    check_fit(scorer, inputs, settings.budget, settings.payload_tokens, progress)


def grid(inputs: TaskInputs, settings: PaperSettings) -> list[tuple[float, float]]:
    """Pairs (beta, gamma): from the settings, else as the previous memory has fixed them, else the paper's grid.

    Without anchors beta has no effect, and only its first value is tried.

    Raises:
        ConfigError: there are several pairs, and no validation examples.
    """
    fixed = inputs.previous.metadata.settings if inputs.previous is not None else {}

    def values(name: str, setting: float | None, candidates: tuple[float, ...]) -> tuple[float, ...]:
        if setting is not None:
            return (setting,)
        return (float(fixed[name]),) if isinstance(fixed.get(name), int | float) else candidates

    betas = values("beta", settings.beta, BETAS if inputs.anchors else BETAS[:1])
    pairs = list(itertools.product(betas, values("gamma", settings.gamma, GAMMAS)))
    if len(pairs) > 1 and not inputs.validation:
        raise ConfigError("beta and gamma are searched on validation examples, and there are none: give both, or some")
    return pairs


def _questions(backbone: Backbone, examples: Sequence[Example], settings: PaperSettings, progress: bool) -> Questions:
    if not examples:
        return Questions((), torch.empty(0, backbone.hidden_size))
    return Questions(examples, extract_keys(backbone, examples, batch_size=settings.batch_size, progress=progress))


def _candidate_pool(inputs: TaskInputs, extraction: Extraction, settings: PaperSettings) -> CandidatePool:
    """The previous memory, and the current task's entries or a shortlist of them."""
    pool = CandidatePool.join(inputs.previous, extraction, inputs.training)
    if settings.shortlist is None:
        return pool
    current, count = pool.keys[pool.num_previous :], settings.shortlist * settings.budget
    rows = nearest(current, extraction.keys[some_rows(len(current), QUERIES, (settings.seed, 2))], count)
    return pool.take(torch.cat([torch.arange(pool.num_previous), pool.num_previous + rows]))


def _select_all(
    inputs: TaskInputs,
    objective: Objective,
    validation: Questions,
    settings: PaperSettings,
    pairs: Sequence[tuple[float, float]],
    run: Run,
) -> list[SelectionResult]:
    """Optimise and round for every pair."""
    backbone = objective.scorer.backbone
    coverage = Coverage.of_keys(objective.pool.keys, settings.budget)
    results = []
    with progress_bar("Selecting entries", len(pairs) * settings.iterations, run.progress) as advance:
        for number, (beta, gamma) in enumerate(pairs):
            calibration = Calibration(backbone.num_layers)
            state = SelectionState.initial(len(objective.pool), settings.budget, calibration)

            def show(state: SelectionState, done: int = number * settings.iterations) -> None:
                advance(done + state.iteration, f"J {state.history[-1].objective:.4f}")

            with tiled_attention(backbone):
                problem = SelectionProblem(objective, coverage, settings, beta, gamma, len(objective.anchors) > 0)
                state = select(problem, state, after_iteration=show)
                bundle = _round(inputs, objective, settings, beta, gamma, state)
                memory = TensorMemory.from_bundle(bundle)
                loss = objective.scorer.mean_loss(validation, memory) if len(validation) else None
            results.append(SelectionResult(beta, gamma, state, bundle, loss))
    return results


def _round(
    inputs: TaskInputs,
    objective: Objective,
    settings: PaperSettings,
    beta: float,
    gamma: float,
    state: SelectionState,
) -> Bundle:
    """TopB of the candidates, with the calibration of the last iteration."""
    backbone = objective.scorer.backbone
    selected = objective.pool.take(state.selected(settings.budget))
    recorded = settings.model_dump() | {"beta": beta, "gamma": gamma}
    return Bundle.create(
        retrieval_keys=selected.keys,
        payload_keys=selected.payload_keys,
        payload_values=selected.payload_values,
        temperature=state.calibration.temperature,
        value_gates=state.calibration.value_gates,
        layer_bias=torch.zeros(backbone.num_layers),
        backbone=backbone.fingerprint,
        budget=settings.budget,
        entries=selected.records,
        weighting=settings.weighting,
        recipe=PAPER,
        settings=recorded | {"candidates": len(objective.pool), "anchors": len(objective.anchors)},
        parent_digest=None if inputs.previous is None else inputs.previous.digest,
        **facts_of(inputs.previous),
    )
