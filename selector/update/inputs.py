"""One task's update of the memory: Algorithm 1 of the paper, from examples to the next bundle.

Letters: N candidates, B budget, n validation questions, L layers.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor

from inducekv_vllm.bundle import Bundle
from inducekv_vllm.errors import BundleError, ConfigError, TaskDataError
from inducekv_vllm.footprint import footprint_bytes, gate_bytes
from inducekv_vllm.page_terms import Weighting

from ..backbone.extraction import Extraction, extract, extract_keys
from ..backbone.injection import Memory
from ..backbone.model import Backbone
from ..backbone.scoring import MEASURED_AT_ONCE, Candidates, Objective, Questions, Scorer, log_prior
from ..backbone.tiled_attention import induced_attention
from ..data.examples import Example
from ..paper.bilevel import Coupling, Hypergradient, SelectionSettings, SelectionState, StepRule, select
from ..paper.calibration import INNER_STEPS, Calibration
from ..paper.candidate_pool import Pool
from ..paper.shortlist import at_random, nearest, query_rows
from ..runtime.checkpoint import Checkpoint
from ..runtime.checks import require_at_least, require_choice
from ..runtime.distributed import in_step, is_main, together
from ..runtime.progress import progress_bar
from .coverage import Coverage
from .measures import Phases, composition, diversity, retrieval_divergence, rounding

Retrieval = Literal["softmax", "uniform"]
ShortlistPolicy = Literal["nearest", "random"]
ValueGates = Literal["fitted", "one"]
RECIPE: Final = "paper"
REFINED: Final = "refined"
# The grid of the paper's "Implementation Details", searched on the first task.
BETAS: Final = (0.1, 0.3, 0.5, 1.0)
GAMMAS: Final = (0.0, 0.05, 0.1, 0.3)


@dataclass(frozen=True)
class UpdateSettings:
    """How to update; the paper's values by default. Raises `ConfigError` for values out of range."""

    budget: int = 256  # B
    payload_tokens: int = 8  # m
    weighting: Weighting = "sqrt"
    beta: float | None = None  # None: what the previous memory has fixed, else by the grid
    gamma: float | None = None
    iterations: int = 100  # I
    inner_steps: int = INNER_STEPS  # J
    outer_step: float = 0.1
    coupling: Coupling = "bilevel"
    hypergradient: Hypergradient = "alternating"
    step_rule: StepRule = "plain"
    shortlist: int | None = 8  # keep this many times B of the current task's candidates; None: the full pool
    shortlist_policy: ShortlistPolicy = "nearest"
    batch_size: int = 8
    retrieval: Retrieval = "softmax"  # "uniform": every entry has the same weight, whatever is asked
    value_gates: ValueGates = "fitted"  # "one": every gate is 1
    seed: int = 0

    def __post_init__(self) -> None:
        require_at_least(1, payload_tokens=self.payload_tokens, batch_size=self.batch_size, shortlist=self.shortlist)
        require_at_least(0, seed=self.seed)
        require_choice(Weighting, weighting=self.weighting)
        require_choice(Retrieval, retrieval=self.retrieval)
        require_choice(ValueGates, value_gates=self.value_gates)
        require_choice(ShortlistPolicy, shortlist_policy=self.shortlist_policy)
        self.selection(self.beta or 0.0, self.gamma or 0.0)

    def selection(self, beta: float, gamma: float) -> SelectionSettings:
        return SelectionSettings(
            budget=self.budget,
            beta=beta,
            gamma=gamma,
            iterations=self.iterations,
            inner_steps=self.inner_steps,
            outer_step=self.outer_step,
            coupling=self.coupling,
            hypergradient=self.hypergradient,
            step_rule=self.step_rule,
        )

    def calibration(self, num_layers: int) -> Calibration:
        """What the inner problem starts from."""
        return Calibration.initial(
            num_layers, fit_temperature=self.retrieval == "softmax", fit_gates=self.value_gates == "fitted"
        )


@dataclass(frozen=True)
class TaskInputs:
    """What a task's update is made from."""

    training: Sequence[Example]  # the candidates, and what the calibration is fitted to
    validation: Sequence[Example]  # never a candidate; may be empty where beta and gamma are given
    anchors: Sequence[Example]  # of earlier tasks; may be empty
    previous: Bundle | None

    @property
    def held(self) -> dict[str, int]:
        """The previous memory's entries by task."""
        return composition(self.previous.metadata.entries) if self.previous is not None else {}


@dataclass(frozen=True)
class Update:
    """The next memory and what is to be reported about it."""

    bundle: Bundle
    report: dict[str, Any]
    training_keys: Tensor  # [number of training examples, d] float32


@dataclass(frozen=True)
class _Solved:
    """One pair of the grid, optimised and rounded."""

    settings: SelectionSettings
    state: SelectionState
    bundle: Bundle
    validation_loss: float | None  # of the rounded memory


def update(
    backbone: Backbone,
    inputs: TaskInputs,
    settings: UpdateSettings,
    checkpoint: Checkpoint,
    *,
    progress: bool = False,
) -> Update:
    """Choose the next memory; the same inputs and settings give the same digest, interrupted or not. Collective.

    The candidates' payloads are kept in the checkpoint's folder.

    Raises:
        TaskDataError: an example is too long for the model or already in the memory, or a loss is not finite.
        BundleError, FingerprintMismatch: the previous memory does not fit the model or the payload size.
        ConfigError: the settings contradict the previous memory, or there is nothing to search beta and gamma with.
    """
    phases, scorer = Phases(), Scorer(backbone, batch_size=MEASURED_AT_ONCE * settings.batch_size)
    check_previous(backbone, inputs, settings.budget, settings.payload_tokens, RECIPE)
    pairs = pairs_to_try(inputs, settings)
    with phases.phase("check"):
        require_context(scorer, (*inputs.training, *inputs.validation, *inputs.anchors), progress)
    with phases.phase("extract"):
        extraction = extract(
            backbone,
            inputs.training,
            settings.payload_tokens,
            batch_size=settings.batch_size,
            payload_dtype=torch.float16,
            pool=_open_pool(backbone, inputs, settings, checkpoint),
            progress=progress,
        )
        validation = _questions(backbone, inputs.validation, settings, progress)
        anchors = _questions(backbone, inputs.anchors, settings, progress)
    with phases.phase("shortlist"):
        objective = Objective(
            scorer=scorer,
            candidates=_pool(inputs, extraction, settings),
            current=Questions(inputs.training, extraction.keys),
            anchors=anchors,
            budget=settings.budget,
            weighting=settings.weighting,
            batch_size=settings.batch_size,
            seed=settings.seed,
        )
    with phases.phase("select"):
        solved = _solve(backbone, inputs, objective, validation, settings, pairs, checkpoint, progress)
    best = min(solved, key=lambda one: one.validation_loss or 0.0)  # of equal ones the first of the grid
    with phases.phase("measure"), induced_attention(backbone):
        report = _report(inputs, objective, validation, settings, solved, best)
    return Update(best.bundle, report | {"phases": phases.records}, extraction.keys)


def check_previous(backbone: Backbone, inputs: TaskInputs, budget: int, payload_tokens: int, recipe: str) -> None:
    """Refuse a previous memory that cannot be continued."""
    previous = inputs.previous
    if previous is None:
        return
    previous.require_backbone(backbone.fingerprint, "the previous bundle")
    if (previous.metadata.recipe == REFINED) != (recipe == REFINED):
        raise BundleError(
            f"the previous bundle was made by the recipe {previous.metadata.recipe!r}, "
            f"which the recipe {recipe!r} cannot go on from"
        )
    if previous.payload_tokens != payload_tokens:
        raise BundleError(
            f"the previous bundle has {previous.payload_tokens} payload tokens an entry, "
            f"found {payload_tokens} in the settings"
        )
    if previous.num_entries > budget:
        raise ConfigError(f"the budget of {budget} is below the {previous.num_entries} entries the previous tasks hold")
    held = {entry.id for entry in previous.metadata.entries}
    for example in inputs.training:
        if example.id in held:
            raise TaskDataError(
                f"the id {example.id!r} of task {example.task!r} is already that of an entry of the previous bundle"
            )


def pairs_to_try(inputs: TaskInputs, settings: UpdateSettings) -> list[tuple[float, float]]:
    """(beta, gamma): as given, else as the previous memory has fixed them, else the paper's grid.

    Without anchors beta multiplies nothing, and its first value stands for all.
    """
    fixed = inputs.previous.metadata.settings if inputs.previous is not None else {}

    def values(name: str, given: float | None, grid: tuple[float, ...]) -> tuple[float, ...]:
        if given is not None:
            return (given,)
        return (float(fixed[name]),) if isinstance(fixed.get(name), int | float) else grid

    betas = values("beta", settings.beta, BETAS if inputs.anchors else BETAS[:1])
    pairs = list(itertools.product(betas, values("gamma", settings.gamma, GAMMAS)))
    if len(pairs) > 1 and not inputs.validation:
        raise ConfigError("beta and gamma are searched on validation examples, and there are none: give both, or some")
    return pairs


def require_context(scorer: Scorer, examples: Sequence[Example], progress: bool) -> None:
    for mine in track(
        in_step(examples),
        "Checking examples",
        console=Console(stderr=True),
        disable=not (progress and is_main()),
        transient=True,
    ):
        with together():
            for example in mine:
                scorer.require_context(example)


def _open_pool(backbone: Backbone, inputs: TaskInputs, settings: UpdateSettings, checkpoint: Checkpoint) -> Pool:
    count = len(inputs.training) + (inputs.previous.num_entries if inputs.previous is not None else 0)
    shape = (backbone.num_layers, count, backbone.num_kv_heads, settings.payload_tokens, backbone.head_dim)
    return Pool.open(checkpoint.folder / "pool", shape, inputs.previous)


def _questions(backbone: Backbone, examples: Sequence[Example], settings: UpdateSettings, progress: bool) -> Questions:
    if not examples:
        return Questions((), torch.empty(0, backbone.hidden_size))
    return Questions(examples, extract_keys(backbone, examples, batch_size=settings.batch_size, progress=progress))


def _pool(inputs: TaskInputs, extraction: Extraction, settings: UpdateSettings) -> Candidates:
    """All candidates, or the previous memory and a shortlist of the current task."""
    pool = Candidates.join(inputs.previous, extraction, inputs.training)
    if settings.shortlist is None:
        return pool
    current, count = pool.keys[pool.num_previous :], settings.shortlist * settings.budget
    if settings.shortlist_policy == "random":
        kept = at_random(len(current), count, settings.seed)
    else:
        kept = nearest(current, extraction.keys[query_rows(len(current), settings.seed)], count)
    return pool.take(torch.cat([torch.arange(pool.num_previous), pool.num_previous + kept]))


def _solve(
    backbone: Backbone,
    inputs: TaskInputs,
    objective: Objective,
    validation: Questions,
    settings: UpdateSettings,
    pairs: Sequence[tuple[float, float]],
    checkpoint: Checkpoint,
    progress: bool,
) -> list[_Solved]:
    """Optimise for every pair, going on from what the checkpoint holds."""
    coverage = Coverage.of_keys(objective.candidates.keys, settings.budget)
    # Tiles are differentiable once; the unrolled hypergradient needs the reference.
    unrolled = settings.hypergradient == "unrolled"
    solved = []
    total = len(pairs) * settings.iterations
    with progress_bar("Selecting entries", total, progress and is_main()) as advance:
        for number, (beta, gamma) in enumerate(pairs):
            name, chosen = f"beta-{beta}-gamma-{gamma}", settings.selection(beta, gamma)
            state = checkpoint.load(name) or SelectionState.initial(
                len(objective.candidates), settings.budget, settings.calibration(backbone.num_layers)
            )

            def keep(state: SelectionState, name: str = name, done: int = number * settings.iterations) -> None:
                checkpoint.save(name, state)
                advance(done + state.iteration, f"J {state.history[-1].objective:.4f}")

            with contextlib.nullcontext() if unrolled else induced_attention(backbone):
                state = select(
                    objective, coverage, chosen, state, has_anchors=len(objective.anchors) > 0, after_iteration=keep
                )
            bundle = _deployed(backbone, inputs, objective, settings, chosen, state)
            with induced_attention(backbone):
                loss = _deployed_loss(objective.scorer, validation, bundle) if len(validation) else None
            solved.append(_Solved(chosen, state, bundle, loss))
    return solved


def _deployed(
    backbone: Backbone,
    inputs: TaskInputs,
    objective: Objective,
    settings: UpdateSettings,
    chosen: SelectionSettings,
    state: SelectionState,
) -> Bundle:
    """TopB of the candidates with the calibration they ended with."""
    selected = objective.candidates.take(state.selected(settings.budget))
    recorded = asdict(settings) | {"beta": chosen.beta, "gamma": chosen.gamma}
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
        recipe=RECIPE,
        settings=recorded | {"candidates": len(objective.candidates), "anchors": len(objective.anchors)},
        parent_digest=None if inputs.previous is None else inputs.previous.digest,
    )


def _deployed_loss(scorer: Scorer, questions: Questions, bundle: Bundle) -> float:
    return scorer.mean_loss(questions, Memory.from_bundle(bundle))


def _report(
    inputs: TaskInputs,
    objective: Objective,
    validation: Questions,
    settings: UpdateSettings,
    solved: Sequence[_Solved],
    best: _Solved,
) -> dict[str, Any]:
    bundle, state, candidates = best.bundle, best.state, objective.candidates
    selected = state.selected(settings.budget)
    relaxed = objective.memory(state.calibration.phi)
    prior = log_prior(state.weights, settings.budget).float()
    deployed = Memory.from_bundle(bundle)
    queries = validation if len(validation) else objective.current
    log_alpha = (queries.keys @ relaxed.retrieval_keys.T / relaxed.temperature + prior).log_softmax(dim=1)  # [n, N]
    alpha = (queries.keys @ deployed.retrieval_keys.T / deployed.temperature).softmax(dim=1)  # [n, B]
    random_rows = np.random.default_rng((settings.seed, 4)).choice(len(candidates), len(selected), replace=False)
    without_coverage = next((one for one in solved if one.settings.gamma == 0), None)

    report: dict[str, Any] = {
        "recipe": RECIPE,
        "digest": bundle.digest,
        "parent_digest": bundle.metadata.parent_digest,
        "settings": bundle.metadata.settings,
        "pool": {
            "training_examples": len(inputs.training),
            "candidates": len(candidates),
            "from_previous": candidates.num_previous,
            "validation_examples": len(validation),
            "anchors": len(objective.anchors),
        },
        "grid": [
            {"beta": one.settings.beta, "gamma": one.settings.gamma, "validation_nll": one.validation_loss}
            for one in solved
        ],
        "history": [measured.as_json() for measured in state.history],
        "calibration": {
            "temperature": float(bundle.temperature),
            "value_gates": bundle.value_gates.tolist(),
            "layer_bias": bundle.layer_bias.tolist(),
        },
        "rounding": rounding(state.weights, selected)
        | {"retrieval_divergence_nats": retrieval_divergence(log_alpha.exp(), alpha, selected)},
        "diversity": {
            "selected": diversity(bundle.retrieval_keys.float()),
            "random": diversity(candidates.keys[torch.from_numpy(np.sort(random_rows))]),
            "selected_with_gamma_0": without_coverage and diversity(without_coverage.bundle.retrieval_keys.float()),
        },
        "composition": {
            "before": inputs.held,
            "after": composition(bundle.metadata.entries),
        },
        "memory_bytes": memory_bytes(bundle),
        "validation_nll": None,
    }
    if len(validation):
        without = objective.scorer.mean_loss(validation)
        with_relaxed = objective.scorer.mean_loss(validation, relaxed, prior)
        with_deployed = _deployed_loss(objective.scorer, validation, bundle)
        report["validation_nll"] = {
            "no_memory": without,
            "relaxed": with_relaxed,
            "deployed": with_deployed,
            "rounding_gap": with_deployed - with_relaxed,
        }
    return report


def memory_bytes(bundle: Bundle) -> int:
    """Of the entries and, where there is one, the gate."""
    backbone = bundle.metadata.backbone
    return gate_bytes(len(bundle.metadata.gate_tasks), backbone.hidden_size) + footprint_bytes(
        bundle.num_entries,
        backbone.hidden_size,
        backbone.num_layers,
        backbone.num_kv_heads,
        bundle.payload_tokens,
        backbone.head_dim,
    )
