"""Refinement: after selection, the chosen entries' keys and values are trained by gradient, under the same bytes.

    current NLL + beta (anchor NLL + KL from the previous memory)

The backbone is frozen. What is trained: payloads of entries that may change, and, where wanted, the calibration
(temperature, gates, layer bias). A question is routed to its own task's entries, and never to the entry that was made
of it, so that entries learn to answer others' questions.

Letters: K entries of the next memory, n questions, L layers, J KV heads, m payload tokens, D head size, d hidden size.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any, Final, Literal

import torch
from torch import Tensor
from torch.nn.functional import kl_div

from inducekv_vllm.errors import TaskDataError

from ..backbone.injection import Memory, answer_logprobs
from ..backbone.scoring import Questions, Scorer, batch_rows, mean_of_batch
from ..paper.calibration import temperature, value_gates
from ..runtime.checkpoint import Checkpoint
from ..runtime.checks import require_at_least, require_choice, require_positive
from ..runtime.distributed import replicated
from .muon import muon_step

Precision = Literal["bfloat16", "float32"]
CALIBRATION_RATE: Final = 0.03
LARGEST_GRADIENT: Final = 1.0  # of all payloads together, by norm
STEPS_BETWEEN_SAVES: Final = 25


@dataclass(frozen=True)
class RefinementSettings:
    """How to refine; raises `ConfigError` for values out of range."""

    steps: int = 400
    batch_size: int = 16
    learning_rate: float = 0.3  # Muon's, of payloads, falling along a cosine
    beta: float = 1.0
    distillation: float = 1.0  # weight of the KL beside the anchors' NLL
    precision: Precision = "bfloat16"  # of the model's matrix products while training; what is trained stays float32
    seed: int = 0

    def __post_init__(self) -> None:
        require_at_least(0, steps=self.steps, seed=self.seed, beta=self.beta, distillation=self.distillation)
        require_at_least(1, batch_size=self.batch_size)
        require_positive(learning_rate=self.learning_rate)
        require_choice(Precision, precision=self.precision)


@dataclass(frozen=True)
class Routed:
    """Questions and the entries that each may retrieve."""

    questions: Questions
    log_prior: Tensor  # [n, K] float32: 0, or -inf for an entry that is not to be retrieved

    def __len__(self) -> int:
        return len(self.questions)


@dataclass(frozen=True)
class Teacher:
    """A memory whose answers are to be kept."""

    memory: Memory
    log_prior: Tensor  # [number of anchors, its entries] float32


@dataclass(frozen=True)
class Lesson:
    """What is trained, and on what."""

    scorer: Scorer
    memory: Memory  # K entries in float32, as they are before
    trainable: Tensor  # [K] bool
    current: Routed
    anchors: Routed | None  # of tasks whose entries are trained, or of all where the calibration is
    teacher: Teacher | None  # for the anchors
    calibrate: bool  # train temperature, gates and layer bias as well
    # [S, K] bool, row 0 all True: of how many entries a step may make use, each row a part of the one before. Every
    # second step takes row 0, every fourth row 1, and so on: what is left of a task when its quota is halved has been
    # trained to do alone.
    nested: Tensor


@dataclass(frozen=True)
class Measured:
    """One step, before it was taken."""

    step: int
    current: float
    anchors: float | None
    distillation: float | None
    temperature: float
    value_gate: float  # mean over the layers
    layer_bias: float  # mean over the layers


@dataclass(frozen=True)
class RefinementState:
    """What is trained, with the running means: all that an interrupted run needs to go on as if it had not been."""

    values: dict[str, Tensor]  # payload_keys and payload_values [L, trained, J, m, D], phi [1 + L], layer_bias [L]
    means: dict[str, Tensor]  # of the gradients
    squares: dict[str, Tensor]  # of the gradients' squares, for AdamW: of phi and layer_bias
    step: int = 0
    history: tuple[Measured, ...] = ()

    @classmethod
    def initial(cls, lesson: Lesson) -> RefinementState:
        memory = lesson.memory
        temperature_ = memory.temperature.double()
        gates = memory.value_gates.double().clamp(max=1 - 1e-6)
        values = {
            "payload_keys": memory.payload_keys[:, lesson.trainable].clone(),
            "payload_values": memory.payload_values[:, lesson.trainable].clone(),
            "phi": torch.cat([temperature_.expm1().log()[None], (gates / (1 - gates)).log()]).float(),
            "layer_bias": memory.layer_bias.clone(),
        }
        means = {name: torch.zeros_like(value) for name, value in values.items()}
        squares = {name: torch.zeros_like(value) for name, value in values.items() if not _is_payload(name)}
        return cls(values, means, squares)

    def memory(self, lesson: Lesson) -> Memory:
        """The K entries with what has been learnt."""
        return _memory(lesson, self.values)


def refine(
    lesson: Lesson,
    settings: RefinementSettings,
    checkpoint: Checkpoint,
    name: str,
    *,
    start: RefinementState | None = None,
    until: int | None = None,
    after_step: Callable[[RefinementState], None] = lambda state: None,
) -> RefinementState:
    """Take all steps, or those before step `until`. Collective.

    Goes on from what the checkpoint holds under `name`, else from `start`, else from the lesson's memory as it is.

    Raises:
        TaskDataError: a loss or a gradient is not finite.
        ConfigError: the progress cannot be written, or what is there is damaged.
    """
    initial = RefinementState.initial(lesson)
    state = _load(checkpoint, name, initial) or start or initial
    last = settings.steps if until is None else min(until, settings.steps)
    while state.step < last:
        state = step(lesson, settings, state)
        if state.step % STEPS_BETWEEN_SAVES == 0 or state.step == last:
            _save(checkpoint, name, state)
        after_step(state)
    return state


def step(lesson: Lesson, settings: RefinementSettings, state: RefinementState) -> RefinementState:
    """One step on a batch of current questions and one of anchors: payloads by Muon, the rest by AdamW; no decay."""
    names = [name for name in state.values if lesson.calibrate or _is_payload(name)]
    leaves = [state.values[name].clone().requires_grad_() for name in names]
    values = state.values | dict(zip(names, replicated(*leaves), strict=True))
    memory = _memory(lesson, values)

    current = _current_loss(lesson, settings, memory, state.step)
    total, anchors, distillation = current, None, None
    if lesson.anchors is not None:
        anchors, distillation = _anchor_losses(lesson, lesson.anchors, settings, memory, state.step)
        kept = anchors if distillation is None else anchors + settings.distillation * distillation
        total = total + settings.beta * kept
    gradients = dict(zip(names, torch.autograd.grad(total, leaves, allow_unused=True), strict=True))
    found = {name: gradient for name, gradient in gradients.items() if gradient is not None}
    if not all(bool(tensor.isfinite().all()) for tensor in (total, *found.values())):
        raise TaskDataError(f"the loss or its gradient is not finite in step {state.step}; nothing was written")

    measured = Measured(
        step=state.step,
        current=float(current.detach()),
        anchors=None if anchors is None else float(anchors.detach()),
        distillation=None if distillation is None else float(distillation.detach()),
        temperature=float(memory.temperature.detach()),
        value_gate=float(memory.value_gates.detach().mean()),
        layer_bias=float(memory.layer_bias.detach().mean()),
    )
    return replace(_stepped(state, _clipped(found), settings), history=(*state.history, measured))


def _current_loss(lesson: Lesson, settings: RefinementSettings, memory: Memory, number: int) -> Tensor:
    """Mean NLL of a batch of the current task: []."""
    rows = batch_rows(len(lesson.current), settings.batch_size, settings.seed, (2, number))
    routed = within(lesson.current, lesson.nested[depth(number, len(lesson.nested))])
    return mean_of_batch(rows, lambda mine: _losses(lesson, settings, routed, memory, mine))


def depth(number: int, rows: int) -> int:
    """Which of S rows of `Lesson.nested` a step takes: the number of its trailing binary ones, S - 1 at most."""
    return min((number ^ (number + 1)).bit_length() - 1, rows - 1)


def within(routed: Routed, entries: Tensor) -> Routed:
    """The questions with those entries alone, [K] bool; one that would be left without any keeps its own."""
    limited = routed.log_prior.masked_fill(~entries, -math.inf)  # [n, K]
    empty = (limited == -math.inf).all(dim=1, keepdim=True)
    return replace(routed, log_prior=torch.where(empty, routed.log_prior, limited))


def _anchor_losses(
    lesson: Lesson, anchors: Routed, settings: RefinementSettings, memory: Memory, number: int
) -> tuple[Tensor, Tensor | None]:
    """Mean NLL of a batch of anchors, and its mean KL from the teacher: [] each."""
    rows = batch_rows(len(anchors), settings.batch_size, settings.seed, (3, number))
    nll = mean_of_batch(rows, lambda mine: _losses(lesson, settings, anchors, memory, mine))
    teacher = lesson.teacher
    if teacher is None or settings.distillation == 0:
        return nll, None
    return nll, mean_of_batch(rows, lambda mine: _divergences(lesson, settings, anchors, teacher, memory, mine))


def _losses(lesson: Lesson, settings: RefinementSettings, routed: Routed, memory: Memory, rows: list[int]) -> Tensor:
    """NLL of each row: [len(rows)]."""
    memory, prior = _reachable(memory, routed.log_prior[rows])
    terms = memory.terms(routed.questions.keys[rows], log_prior=prior)
    with _precision(lesson, settings):
        return lesson.scorer.losses([routed.questions.examples[row] for row in rows], memory, terms)


def _divergences(
    lesson: Lesson, settings: RefinementSettings, routed: Routed, teacher: Teacher, memory: Memory, rows: list[int]
) -> Tensor:
    """KL(teacher | memory), summed over the answer's tokens, of each row: [len(rows)]."""
    scorer, keys = lesson.scorer, routed.questions.keys[rows]
    examples = [routed.questions.examples[row] for row in rows]
    prompts, answers = [scorer.prefix(e) for e in examples], [scorer.answer_tokens(e) for e in examples]
    known, prior = _reachable(teacher.memory, teacher.log_prior[rows])
    known_terms = known.terms(keys, log_prior=prior)
    with torch.no_grad(), _precision(lesson, settings):
        targets = answer_logprobs(scorer.backbone, prompts, answers, known, known_terms)
    memory, prior = _reachable(memory, routed.log_prior[rows])
    terms = memory.terms(keys, log_prior=prior)
    with _precision(lesson, settings):
        learnt = answer_logprobs(scorer.backbone, prompts, answers, memory, terms)
    pairs = zip(learnt, targets, strict=True)
    return torch.stack([kl_div(mine, target, reduction="sum", log_target=True) for mine, target in pairs])


def _precision(lesson: Lesson, settings: RefinementSettings) -> torch.autocast:
    return torch.autocast(lesson.scorer.backbone.device.type, torch.bfloat16, enabled=settings.precision == "bfloat16")


def _reachable(memory: Memory, log_prior: Tensor) -> tuple[Memory, Tensor]:
    """The memory and the prior [n, K] without entries that none of the n questions may retrieve.

    Under "sqrt" they stay: an entry of alpha = 0 still takes its share of the attention.
    """
    used = (log_prior > -math.inf).any(dim=0)  # [K] bool
    if memory.weighting == "sqrt" or bool(used.all()):
        return memory, log_prior
    kept = replace(
        memory,
        retrieval_keys=memory.retrieval_keys[used],
        payload_keys=memory.payload_keys[:, used],
        payload_values=memory.payload_values[:, used],
    )
    return kept, log_prior[:, used]


def _memory(lesson: Lesson, values: dict[str, Tensor]) -> Memory:
    rows = lesson.trainable.nonzero()[:, 0]
    memory = replace(
        lesson.memory,
        payload_keys=lesson.memory.payload_keys.index_copy(1, rows, values["payload_keys"]),
        payload_values=lesson.memory.payload_values.index_copy(1, rows, values["payload_values"]),
    )
    if not lesson.calibrate:
        return memory
    return replace(
        memory,
        temperature=temperature(values["phi"]),
        value_gates=value_gates(values["phi"]),
        layer_bias=values["layer_bias"],
    )


def _clipped(gradients: dict[str, Tensor]) -> dict[str, Tensor]:
    """The payloads' gradients shortened to a norm of at most `LARGEST_GRADIENT`."""
    payloads = [gradient for name, gradient in gradients.items() if _is_payload(name)]
    norm = torch.stack([gradient.norm() for gradient in payloads]).norm()
    factor = LARGEST_GRADIENT / norm.clamp(min=LARGEST_GRADIENT)
    return {name: g * factor if _is_payload(name) else g for name, g in gradients.items()}


def _stepped(state: RefinementState, gradients: dict[str, Tensor], settings: RefinementSettings) -> RefinementState:
    """After the optimisers' step; of what has no gradient nothing changes."""
    falling = 0.5 * (1 + math.cos(math.pi * state.step / settings.steps))
    values, means, squares = dict(state.values), dict(state.means), dict(state.squares)
    for name, gradient in gradients.items():
        if _is_payload(name):
            values[name], means[name] = muon_step(values[name], gradient, means[name], settings.learning_rate * falling)
            continue
        value, mean, square = values[name].clone().requires_grad_(), means[name].clone(), squares[name].clone()
        value.grad = gradient
        adam = torch.optim.AdamW([value], lr=CALIBRATION_RATE * falling, weight_decay=0.0, foreach=False)
        adam.state[value] = {"step": torch.tensor(float(state.step)), "exp_avg": mean, "exp_avg_sq": square}
        adam.step()
        values[name], means[name], squares[name] = value.detach(), mean, square
    return replace(state, values=values, means=means, squares=squares, step=state.step + 1)


def _is_payload(name: str) -> bool:
    return name.startswith("payload")


def _save(checkpoint: Checkpoint, name: str, state: RefinementState) -> None:
    progress: dict[str, Any] = {"step": state.step, "history": [asdict(measured) for measured in state.history]}
    checkpoint.write(name, _tensors(state), progress)


def _tensors(state: RefinementState) -> dict[str, Tensor]:
    groups = {"values": state.values, "means": state.means, "squares": state.squares}
    return {f"{group}.{key}": tensor for group, found in groups.items() for key, tensor in found.items()}


def _load(checkpoint: Checkpoint, name: str, like: RefinementState) -> RefinementState | None:
    """What was saved last, if anything: tensors of the names and shapes of `like`."""
    found = checkpoint.read(name)
    if found is None:
        return None
    tensors, progress = found
    wanted = _tensors(like)
    if {key: tensor.shape for key, tensor in tensors.items()} != {key: t.shape for key, t in wanted.items()}:
        raise checkpoint.damaged(name, f"expected the tensors {sorted(wanted)} in their shapes, found others")
    groups: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        group, _, rest = key.partition(".")
        groups.setdefault(group, {})[rest] = tensor
    try:
        history = tuple(Measured(**measured) for measured in progress["history"])
        return RefinementState(**groups, step=int(progress["step"]), history=history)
    except (KeyError, TypeError, ValueError) as error:
        raise checkpoint.damaged(name, error) from error
