"""One task's update of the memory by the refined recipe: choose entries, refine them, fit the gate.

Every task has a quota of entries, found through a relevance gate. The arriving task's entries are chosen and trained on
its examples; entries of earlier tasks stay as they are, to the bit, unless the quotas shrink: then the most used ones
are kept, and trained on the task's anchors to answer as all of them did.

The calibration is shared by all tasks, so it is trained with the first one and kept (`calibrate="first"`), or trained
every time with all anchors in the loss (`calibrate="every"`).

Letters: K entries of the next memory, B budget, n questions, L layers, J KV heads, m payload tokens, D head size,
d hidden size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final, Literal

import numpy as np
import torch
from torch import Tensor

from inducekv_vllm.bundle import Bundle, EntryRecord, Gate
from inducekv_vllm.errors import BundleError, ConfigError, InduceKVError, TaskDataError
from inducekv_vllm.retrieval import Weighting

from .backbone import Backbone
from .build import INITIAL_TEMPERATURE, INITIAL_VALUE_GATE, k_center
from .checkpoint import Checkpoint
from .data import Example, entry_records
from .deployed import Deployed, openings
from .distributed import is_main
from .extract import extract, extract_query_keys
from .gate_fitting import fit_gate
from .induced_attention import induced_attention
from .injection import Memory
from .objective import Questions, Scorer
from .progress import progress_bar
from .quotas import quotas
from .refinement import Lesson, Precision, RefinementSettings, RefinementState, Routed, Teacher, refine
from .report import Phases, composition, diversity
from .update import REFINED as RECIPE
from .update import TaskInputs, Update, check_previous, memory_bytes, require_context

LEARNING_RATES: Final = (0.05, 0.1, 0.2)  # searched on validation
TRIAL_SHARE: Final = 0.25  # of the steps, that each learning rate gets in the search


@dataclass(frozen=True)
class RefinedSettings:
    """How to update by the refined recipe. Raises `ConfigError` for values out of range."""

    budget: int = 256  # B
    payload_tokens: int = 8  # m
    weighting: Weighting = "prior"
    entries_per_task: int = 4
    entry_policy: Literal["random", "k-center"] = "k-center"
    steps: int = RefinementSettings.steps
    batch_size: int = RefinementSettings.batch_size
    learning_rate: float | None = None  # None: searched on validation
    beta: float = RefinementSettings.beta  # weight of the anchors
    distillation: float = RefinementSettings.distillation
    calibrate: Literal["first", "every", "never"] = "first"
    precision: Precision = RefinementSettings.precision
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("budget", "payload_tokens", "entries_per_task"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, found {getattr(self, name)}")
        if self.weighting != "prior":
            raise ConfigError(f'the refined recipe needs the weighting "prior", found {self.weighting!r}')
        if self.entry_policy not in ("random", "k-center"):
            raise ConfigError(f"the entry policy must be random or k-center, found {self.entry_policy!r}")
        if self.calibrate not in ("first", "every", "never"):
            raise ConfigError(f"calibrate must be first, every or never, found {self.calibrate!r}")
        self.refinement(LEARNING_RATES[0] if self.learning_rate is None else self.learning_rate)

    def refinement(self, learning_rate: float) -> RefinementSettings:
        return RefinementSettings(
            steps=self.steps,
            batch_size=self.batch_size,
            learning_rate=learning_rate,
            beta=self.beta,
            distillation=self.distillation,
            precision=self.precision,
            seed=self.seed,
        )


@dataclass(frozen=True)
class _Known:
    """Query keys [n, 2, d] of everything that is asked."""

    training: Tensor
    validation: Tensor
    anchors: Tensor
    base: Tensor


@dataclass(frozen=True)
class _Plan:
    """Which entries the next memory has: rows of the previous memory, then the arriving task's examples."""

    kept: Tensor  # [number of old entries that stay] int64, rows of the previous memory, rising
    chosen: list[int]  # rows of the training examples
    shares: dict[str, int]  # entries by task
    shrunk: frozenset[str]  # tasks that lose entries


@dataclass(frozen=True)
class _Trial:
    """A learning rate, how it did on the validation examples, and how far it got."""

    learning_rate: float
    validation_nll: float | None  # None: it diverged, or was not searched
    state: RefinementState | None


def update_refined(
    backbone: Backbone,
    inputs: TaskInputs,
    settings: RefinedSettings,
    checkpoint: Checkpoint,
    *,
    base: Sequence[Example] = (),
    progress: bool = False,
) -> Update:
    """Choose, refine and gate; the same inputs and settings give the same digest, interrupted or not. Collective.

    Args:
        base: questions that the model answers well by itself, for which the gate is to stay closed; their answers are
            not used.

    Raises:
        TaskDataError: an example is too long for the model or already in the memory, or a loss is not finite.
        BundleError, FingerprintMismatch: the previous memory does not fit the model, the payload size or the recipe.
        ConfigError: the settings contradict the previous memory, or there is nothing to search with.
    """
    phases, scorer = Phases(), Scorer(backbone, batch_size=settings.batch_size)
    check_inputs(backbone, inputs, settings)
    with phases.phase("check"):
        require_context(scorer, (*inputs.training, *inputs.validation, *inputs.anchors, *base), progress)
    with phases.phase("extract"):
        known = _Known(
            *(
                extract_query_keys(backbone, examples, batch_size=settings.batch_size, progress=progress)
                for examples in (inputs.training, inputs.validation, inputs.anchors, base)
            )
        )
        plan = _plan(inputs, settings, known)
        start, records = _starting_memory(backbone, inputs, settings, plan)
    with phases.phase("refine"), induced_attention(backbone):
        lesson = _lesson(scorer, inputs, settings, known, plan, start, records)
        trials = _search(lesson, inputs, known, settings, checkpoint, progress)
        best = min(trials, key=lambda trial: math.inf if trial.validation_nll is None else trial.validation_nll)
        with progress_bar("Refining", settings.steps, progress and is_main()) as advance:
            state = refine(
                lesson,
                settings.refinement(best.learning_rate),
                checkpoint,
                "refinement",
                start=best.state,
                after_step=lambda state: advance(state.step, _shown(state)),
            )
    with phases.phase("gate"):
        gate = fit_gate(_own_keys(inputs, known, plan), known.base)
        bundle = _bundle(backbone, inputs, settings, best.learning_rate, records, state.memory(lesson), gate, len(base))
    with phases.phase("measure"), induced_attention(backbone):
        report = _report(scorer, inputs, known, base, bundle, state, trials, plan)
    return Update(bundle, report | {"phases": phases.records}, known.training[:, 0].contiguous())


def check_inputs(backbone: Backbone, inputs: TaskInputs, settings: RefinedSettings) -> None:
    """Refuse examples and a previous memory that the recipe cannot go on from."""
    check_previous(backbone, inputs, settings.budget, settings.payload_tokens, RECIPE)
    check_tasks(inputs, settings)


def check_tasks(inputs: TaskInputs, settings: RefinedSettings) -> None:
    """The part of it that needs no model."""
    task = arriving_task(inputs.training)
    for example in inputs.validation:
        if example.task != task:
            raise TaskDataError(f"validation example {example.id!r} is of the task {example.task!r}, expected {task!r}")
    if task in inputs.held:
        raise TaskDataError(f"the previous bundle already holds the task {task!r}: a task is refined once")
    if missing := sorted(inputs.held.keys() - {anchor.task for anchor in inputs.anchors}):
        raise ConfigError(
            f"there are no anchors of the task {missing[0]!r}, which the previous bundle holds: "
            "the gate is fitted to anchors of every task; give the store that its run has written"
        )
    if inputs.previous is None and inputs.anchors:
        raise ConfigError(
            f"the store holds anchors of the task {inputs.anchors[0].task!r}, but there is no previous bundle: "
            "name it, or a store of its own for this stream"
        )
    quotas(inputs.held, task, budget=settings.budget, entries_per_task=settings.entries_per_task)
    if settings.learning_rate is None and not inputs.validation:
        raise ConfigError("the learning rate is searched on validation examples, and there are none: give it, or some")


def arriving_task(examples: Sequence[Example]) -> str:
    """The one task that all examples are of.

    Raises:
        TaskDataError: there are several.
    """
    names = sorted({example.task for example in examples})
    if len(names) > 1:
        raise TaskDataError(f"the refined recipe takes one task at a time, found {', '.join(map(repr, names))}")
    return names[0]


def _plan(inputs: TaskInputs, settings: RefinedSettings, known: _Known) -> _Plan:
    entries = inputs.previous.metadata.entries if inputs.previous is not None else ()
    before = inputs.held
    task = arriving_task(inputs.training)
    shares = quotas(before, task, budget=settings.budget, entries_per_task=settings.entries_per_task)
    shares[task] = min(shares[task], len(inputs.training))
    kept: list[int] = []
    for old, count in before.items():
        rows = [row for row, entry in enumerate(entries) if entry.task == old]
        if shares[old] < count:
            rows = _most_used(inputs, known, old, rows, shares[old])
        kept += rows
    rng = np.random.default_rng((settings.seed, 6))
    if settings.entry_policy == "random":
        chosen = sorted(rng.choice(len(inputs.training), shares[task], replace=False).tolist())
    else:
        first = int(rng.integers(len(inputs.training)))
        chosen = sorted(k_center(known.training[:, 0].contiguous(), shares[task], first))
    shrunk = frozenset(old for old, count in before.items() if shares[old] < count)
    return _Plan(torch.tensor(sorted(kept), dtype=torch.int64), chosen, shares, shrunk)


def _most_used(inputs: TaskInputs, known: _Known, task: str, rows: list[int], count: int) -> list[int]:
    """Those of a task's entries that its anchors give the most weight: `count` of `rows`, rising."""
    assert inputs.previous is not None
    mine = [row for row, anchor in enumerate(inputs.anchors) if anchor.task == task]
    keys = inputs.previous.retrieval_keys[rows].float()  # [len(rows), d]
    weights = (known.anchors[mine, 0] @ keys.T / inputs.previous.temperature).softmax(dim=1).sum(dim=0)
    return sorted(rows[place] for place in weights.argsort(descending=True, stable=True)[:count].tolist())


def _starting_memory(
    backbone: Backbone, inputs: TaskInputs, settings: RefinedSettings, plan: _Plan
) -> tuple[Memory, tuple[EntryRecord, ...]]:
    """The K entries before refinement: old ones as stored, new ones as extracted, all in float32."""
    examples = [inputs.training[row] for row in plan.chosen]
    fresh = extract(backbone, examples, settings.payload_tokens, batch_size=settings.batch_size)
    records = entry_records(examples)
    # A bundle rounds its keys: training sees them rounded alike.
    memory = Memory(
        retrieval_keys=fresh.keys.half().float(),
        payload_keys=fresh.payload_keys,
        payload_values=fresh.payload_values,
        temperature=torch.tensor(INITIAL_TEMPERATURE),
        value_gates=torch.full((backbone.num_layers,), INITIAL_VALUE_GATE),
        layer_bias=torch.zeros(backbone.num_layers),
        weighting="prior",
    )
    if inputs.previous is None:
        return memory, records
    old = Memory.from_bundle(inputs.previous)
    joined = replace(
        old,
        retrieval_keys=torch.cat([old.retrieval_keys[plan.kept], memory.retrieval_keys]),
        payload_keys=torch.cat([old.payload_keys[:, plan.kept], memory.payload_keys], dim=1),
        payload_values=torch.cat([old.payload_values[:, plan.kept], memory.payload_values], dim=1),
    )
    entries = inputs.previous.metadata.entries
    return joined, tuple(entries[row] for row in plan.kept.tolist()) + records


def _lesson(
    scorer: Scorer,
    inputs: TaskInputs,
    settings: RefinedSettings,
    known: _Known,
    plan: _Plan,
    start: Memory,
    records: tuple[EntryRecord, ...],
) -> Lesson:
    """What is trained on what: new entries on the task, entries of shrunken tasks on their anchors."""
    tasks = [record.task for record in records]
    task = arriving_task(inputs.training)
    calibrate = settings.calibrate == "every" or (settings.calibrate == "first" and inputs.previous is None)
    taught = [
        row
        for row, anchor in enumerate(inputs.anchors)
        if anchor.task in plan.shrunk or (calibrate and anchor.task in plan.shares)
    ]
    examples = [inputs.anchors[row] for row in taught]
    anchors = Questions(examples, known.anchors[taught, 0])
    teacher = None
    if inputs.previous is not None and taught:
        teacher = Teacher(Memory.from_bundle(inputs.previous), _prior(examples, inputs.previous.metadata.entries))
    training = Questions(inputs.training, known.training[:, 0])
    return Lesson(
        scorer=scorer,
        memory=start,
        trainable=torch.tensor([name == task or name in plan.shrunk for name in tasks]),
        current=Routed(training, _prior(inputs.training, records)),
        anchors=Routed(anchors, _prior(examples, records)) if taught else None,
        teacher=teacher,
        calibrate=calibrate,
    )


def _prior(examples: Sequence[Example], entries: Sequence[EntryRecord]) -> Tensor:
    """[n, K] float32: 0 for the entries of an example's task, -inf for others, and for an entry made of itself.

    Where it is the only entry of its task, the entry made of an example is all that it can retrieve.
    """
    own_task = np.array([[example.task == entry.task for entry in entries] for example in examples])  # [n, K] bool
    itself = np.array([[example.source_digest == entry.source_digest for entry in entries] for example in examples])
    others = own_task & ~itself
    wanted = np.where(others.any(axis=1, keepdims=True), others, own_task)
    return torch.zeros(wanted.shape).masked_fill(torch.from_numpy(~wanted), -math.inf)


def _search(
    lesson: Lesson,
    inputs: TaskInputs,
    known: _Known,
    settings: RefinedSettings,
    checkpoint: Checkpoint,
    progress: bool,
) -> list[_Trial]:
    """Each learning rate for part of the way along the whole run's schedule: a short run would favour high rates."""
    if settings.learning_rate is not None:
        return [_Trial(settings.learning_rate, None, None)]
    steps = math.ceil(TRIAL_SHARE * settings.steps)
    trials: list[_Trial] = []
    failure: InduceKVError | None = None
    with progress_bar("Searching the learning rate", steps * len(LEARNING_RATES), progress and is_main()) as advance:
        for number, rate in enumerate(LEARNING_RATES):

            def show(state: RefinementState, done: int = number * steps) -> None:
                advance(done + state.step, _shown(state))

            chosen = settings.refinement(rate)
            try:
                state = refine(lesson, chosen, checkpoint, f"trial-{rate}", until=steps, after_step=show)
                memory = state.memory(lesson)
                _require_storable(memory)
                trials.append(_Trial(rate, _validation_loss(lesson, inputs, known, memory), state))
            except (TaskDataError, BundleError) as error:  # it diverged, with this rate
                failure = error
                trials.append(_Trial(rate, None, None))
    if failure is not None and all(trial.state is None for trial in trials):
        raise failure
    return trials


def _require_storable(memory: Memory) -> None:
    """Raises BundleError: a payload has left the range of float16."""
    limit = torch.finfo(torch.float16).max
    for name in ("payload_keys", "payload_values"):
        largest = float(getattr(memory, name).abs().max())
        if largest > limit:
            raise BundleError(
                f"refined {name} reach {largest:.4g}, a bundle's float16 holds {limit:.4g}: lower the rate"
            )


@torch.no_grad()
def _validation_loss(lesson: Lesson, inputs: TaskInputs, known: _Known, memory: Memory) -> float:
    """Mean NLL of the validation examples with their own task's entries."""
    own = (lesson.current.log_prior > -math.inf).any(dim=0)  # [K] bool
    prior = torch.zeros(len(own)).masked_fill(~own, -math.inf)
    return lesson.scorer.mean_loss(Questions(inputs.validation, known.validation[:, 0]), memory, prior)


def _own_keys(inputs: TaskInputs, known: _Known, plan: _Plan) -> dict[str, Tensor]:
    """Query keys by task: anchors of the earlier ones, training and validation examples of the arriving one."""
    arriving = arriving_task(inputs.training)
    by_task = {
        task: known.anchors[[a.task == task for a in inputs.anchors]] for task in plan.shares if task != arriving
    }
    return by_task | {arriving: torch.cat([known.training, known.validation])}


def _bundle(
    backbone: Backbone,
    inputs: TaskInputs,
    settings: RefinedSettings,
    learning_rate: float,
    records: tuple[EntryRecord, ...],
    memory: Memory,
    gate: Gate,
    base_questions: int,
) -> Bundle:
    _require_storable(memory)
    return Bundle.create(
        retrieval_keys=memory.retrieval_keys,
        payload_keys=memory.payload_keys,
        payload_values=memory.payload_values,
        temperature=memory.temperature,
        value_gates=memory.value_gates,
        layer_bias=memory.layer_bias,
        backbone=backbone.fingerprint,
        budget=settings.budget,
        entries=records,
        weighting="prior",
        recipe=RECIPE,
        settings=asdict(settings)
        | {"learning_rate": learning_rate, "anchors": len(inputs.anchors), "base_questions": base_questions},
        parent_digest=None if inputs.previous is None else inputs.previous.digest,
        gate=gate,
    )


def _report(
    scorer: Scorer,
    inputs: TaskInputs,
    known: _Known,
    base: Sequence[Example],
    bundle: Bundle,
    state: RefinementState,
    trials: Sequence[_Trial],
    plan: _Plan,
) -> dict[str, Any]:
    deployed, plain = Deployed(scorer, bundle), Deployed(scorer, None)
    before, after = inputs.held, composition(bundle.metadata.entries)
    search = [
        {"learning_rate": one.learning_rate, "validation_nll": one.validation_nll} for one in trials if len(trials) > 1
    ]
    assert bundle.gate is not None
    report: dict[str, Any] = {
        "recipe": RECIPE,
        "digest": bundle.digest,
        "parent_digest": bundle.metadata.parent_digest,
        "settings": bundle.metadata.settings,
        "pool": {
            "training_examples": len(inputs.training),
            "candidates": len(inputs.training),
            "from_previous": len(plan.kept),
            "validation_examples": len(inputs.validation),
            "anchors": len(inputs.anchors),
            "base_questions": len(base),
        },
        "refinement": {"search": search, "history": [asdict(measured) for measured in state.history]},
        "calibration": {
            "temperature": float(bundle.temperature),
            "value_gates": bundle.value_gates.tolist(),
            "layer_bias": bundle.layer_bias.tolist(),
        },
        "diversity": {"selected": diversity(bundle.retrieval_keys.float())},
        "composition": {"before": before, "after": after},
        "quotas": {"before": before, "after": plan.shares},
        "gate": {
            "tasks": list(bundle.gate.tasks),
            "thresholds": bundle.gate.thresholds.tolist(),
            "openings": _openings(bundle, inputs, known, base),
        },
        "memory_bytes": memory_bytes(bundle),
        "validation_nll": None,
        "validation_accuracy": None,
    }
    if inputs.validation:
        for name, measure in (("validation_nll", Deployed.mean_loss), ("validation_accuracy", Deployed.accuracy)):
            report[name] = {
                "no_memory": measure(plain, inputs.validation, known.validation),
                "deployed": measure(deployed, inputs.validation, known.validation),
            }
    return report


def _openings(bundle: Bundle, inputs: TaskInputs, known: _Known, base: Sequence[Example]) -> list[dict[str, Any]]:
    """How often the gate opens, by task and kind of example; all of them took part in its fit."""
    found = []
    groups = (("validation", inputs.validation, known.validation), ("anchors", inputs.anchors, known.anchors))
    for split, examples, keys in (*groups, ("base", base, known.base)):
        for task in dict.fromkeys(example.task for example in examples):
            rows = [row for row, example in enumerate(examples) if example.task == task]
            shares = openings(bundle, task, keys[rows])
            found.append(
                {
                    "task": task,
                    "split": split,
                    "questions": len(rows),
                    "opened": shares["opened"],
                    "routed_to_own_task": None if split == "base" else shares["own_task"],
                }
            )
    return found


def _shown(state: RefinementState) -> str:
    return f"NLL {state.history[-1].current:.3f}" if state.history else ""
