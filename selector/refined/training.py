"""Train a task's entries by gradient, to answer the task's questions; the backbone is frozen.

A question is answered with its task's entries, as a server with a gate answers it, but never with the entry that was
made of it, so that entries learn to answer other questions.

Payloads are prefix-tuning parameters: Muon updates them, the values and maps of wide models in the coordinates of a
`Preconditioner`. AdamW updates the calibration (temperature, gates, layer bias) if the problem trains it.

Shapes: K entries of the task, n questions, L layers, J KV heads, m payload tokens, D head size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final, Protocol

import numpy as np
import torch
from torch import Tensor

from inducekv_vllm.bundle import EntryRecord
from inducekv_vllm.errors import BundleError, TaskDataError

from ..backbone.injection import TensorMemory
from ..backbone.scoring import Questions, Scorer, batch_rows
from ..data.examples import Example
from ..runtime.checkpoint import Checkpoint
from ..update.parametrization import temperature, value_gates
from .muon import Muon
from .preconditioner import Preconditioner
from .settings import Precision

CALIBRATION_RATE: Final = 0.03
# With a preconditioner: the rate of maps, whatever that of tokens, and the share of the steps in which rates rise.
MAP_RATE: Final = 0.005
WARM_UP: Final = 0.1
MAX_GRADIENT_NORM: Final = 1.0  # of all payloads together
STEPS_BETWEEN_CHECKS: Final = 25
CHECKED: Final = 64  # validation questions, at most, that a check asks
LEAST_GAIN: Final = 0.01  # nats of an answer, from check to check
TOKENS: Final = ("payload_keys", "payload_values")
MAPS: Final = ("map_in", "map_out")  # if the memory has them
PAYLOADS: Final = (*TOKENS, *MAPS)
CALIBRATION: Final = ("phi", "layer_bias")


@dataclass(frozen=True)
class TrainingProblem:
    """What is trained, and on what."""

    scorer: Scorer
    memory: TensorMemory  # the task's K entries in float32, before training
    training: Questions
    log_prior: Tensor  # [n, K] float32, of the training questions: 0, or -inf for an entry that must not be retrieved
    validation: Questions
    calibrate: bool  # train temperature, gates and layer bias too
    first_layer: int = 0  # entries of decoupled memory stay without effect in the layers before it
    preconditioner: Preconditioner | None = None  # of decoupled memory whose values and maps start at 0


class TrainingSettings(Protocol):
    """Those of a recipe that trains."""

    @property
    def steps(self) -> int: ...

    @property
    def batch_size(self) -> int: ...

    @property
    def patience(self) -> int | None: ...  # checks that may pass without a gain; None: any number

    @property
    def precision(self) -> Precision: ...  # of matrix products

    @property
    def seed(self) -> int: ...


@dataclass(frozen=True)
class StepRecord:
    """A step's loss."""

    step: int
    current: float


def train(
    training: Training,
    checkpoint: Checkpoint | None,
    name: str,
    after_step: Callable[[Training], None] = lambda training: None,
    *,
    until: int | None = None,
) -> TensorMemory:
    """Take all steps, or those until nothing is gained, resuming from the checkpoint under `name`, if there is one.

    Args:
        until: the step to stop at; None for the last one.

    Raises:
        TaskDataError: a loss or a gradient is not finite.
        BundleError: a payload has left the range of float16.
        ConfigError: the progress cannot be written, or the file is damaged.
    """
    training.load(checkpoint, name)
    steps, patience = training.settings.steps, training.settings.patience
    until = steps if until is None else until
    while training.step < until and not is_done(training.checks, patience):
        training.take_step()
        checked = training.step % STEPS_BETWEEN_CHECKS == 0 or training.step == steps
        if checked and patience is not None and len(training.problem.validation):
            training.check()
        if checked or training.step == until:
            training.save(checkpoint, name)
        after_step(training)
    memory = training.memory()
    require_storable(memory)
    return memory


def is_done(losses: Sequence[float], patience: int | None) -> bool:
    """Whether the validation losses [number of checks] end a training: nothing is left, or nothing more comes.

    Args:
        patience: how many checks in a row may pass without a gain of `LEAST_GAIN`; None: any number.
    """
    if patience is None:
        return False
    best, without_gain = math.inf, 0
    for loss in losses:
        best, without_gain = (loss, 0) if loss <= best - LEAST_GAIN else (best, without_gain + 1)
    return best <= LEAST_GAIN or without_gain >= patience


class Training:
    """Parameters and optimisers of one training run."""

    def __init__(self, problem: TrainingProblem, settings: TrainingSettings, learning_rate: float) -> None:
        self.problem, self.settings, self.learning_rate = problem, settings, learning_rate
        self.parameters = _initial_parameters(problem)
        for name, parameter in self.parameters.items():
            parameter.requires_grad_(problem.calibrate or name in PAYLOADS)
        tokens, maps, calibration = (
            [self.parameters[name] for name in names if name in self.parameters]
            for names in (TOKENS, MAPS, CALIBRATION)
        )
        self.optimizers: dict[str, torch.optim.Optimizer] = {"muon": Muon(tokens, lr=learning_rate)}
        if maps:
            # As small beside the rate of the payloads as a map's starting values are beside theirs.
            rate = learning_rate / math.sqrt(self.parameters["map_in"].shape[-1])
            self.optimizers["muon_maps"] = Muon(maps, lr=MAP_RATE if problem.preconditioner else rate)
        if problem.calibrate:
            self.optimizers["adamw"] = torch.optim.AdamW(
                calibration, lr=CALIBRATION_RATE, weight_decay=0.0, foreach=False
            )
        self.step = 0
        self.history: list[StepRecord] = []
        self.checks: list[float] = []  # validation losses, one for each check
        self.checked_at: int | None = None  # the step of the last one, unless it was before a resume
        self.best: dict[str, Tensor] = {}  # the parameters at the check of the least loss
        self.compared: dict[int, list[float]] = {}  # by step, the losses that were compared with other trainings'

    def memory(self) -> TensorMemory:
        """The K entries as trained so far; after checks, as the best one found them."""
        parameters = self.best or {name: parameter.detach() for name, parameter in self.parameters.items()}
        return _memory(self.problem, parameters)

    def take_step(self) -> None:
        """One step on a batch of questions.

        Raises:
            TaskDataError: a loss or a gradient is not finite.
        """
        trained = {name: parameter for name, parameter in self.parameters.items() if parameter.requires_grad}
        memory = _memory(self.problem, self.parameters)
        loss = step_loss(self.problem, self.settings, memory, self.step)
        gradients = torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
        by_name = {name: g for name, g in zip(trained, gradients, strict=True) if g is not None}
        if not all(bool(tensor.isfinite().all()) for tensor in (loss, *by_name.values())):
            raise TaskDataError(f"the loss or its gradient is not finite in step {self.step}; nothing was written")

        self.history.append(StepRecord(self.step, float(loss.detach())))
        for name, gradient in clipped(self._of_trained_layers(by_name)).items():
            trained[name].grad = gradient
        share = self._share_of_rates()
        for optimizer in self.optimizers.values():
            for group in optimizer.param_groups:
                group["lr"] = optimizer.defaults["lr"] * share
            optimizer.step()
            optimizer.zero_grad()
        self.step += 1

    def _share_of_rates(self) -> float:
        """Of this step: along a cosine, after a linear rise if the payloads are preconditioned."""
        steps = self.settings.steps
        decay = 0.5 * (1 + math.cos(math.pi * self.step / steps))
        return decay * min(1.0, (self.step + 1) / (WARM_UP * steps)) if self.problem.preconditioner else decay

    def _of_trained_layers(self, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        """The gradients, those of payloads 0 in the layers that stay as they are."""
        first = self.problem.first_layer
        if not first:
            return gradients
        memory = self.problem.memory
        later = torch.tensor(memory.layers or range(len(memory.payload_keys))) >= first  # [L]
        return {
            name: torch.where(later.view(-1, *[1] * (g.ndim - 1)), g, 0) if name in PAYLOADS else g
            for name, g in gradients.items()
        }

    def check(self) -> None:
        """Measure the state on validation questions, and keep it if it is the best so far."""
        now = {name: parameter.detach().clone() for name, parameter in self.parameters.items()}
        self.checks.append(self.problem.scorer.mean_loss(self._checked(), _memory(self.problem, now)))
        self.checked_at = self.step
        if self.checks[-1] == min(self.checks):
            self.best = now

    def compare(self, step: int, checkpoint: Checkpoint | None, name: str) -> Tensor:
        """NLL of validation questions [at most `CHECKED`] after that step, as it was when this was first asked for.

        Raises:
            TaskDataError: a loss is not finite.
            ConfigError: the file of the checkpoint cannot be written.
        """
        if step not in self.compared:
            self.compared[step] = self.problem.scorer.each_loss(self._checked(), self.memory()).tolist()
            self.save(checkpoint, name)
        return torch.tensor(self.compared[step], dtype=torch.float64)

    def _checked(self) -> Questions:
        validation = self.problem.validation
        rows = batch_rows(len(validation), CHECKED, self.settings.seed, (7,))
        first_active = None if validation.first_active is None else validation.first_active[rows]
        return Questions([validation.examples[row] for row in rows], validation.keys[rows], first_active)

    def save(self, checkpoint: Checkpoint | None, name: str) -> None:
        """Raises ConfigError: the file cannot be written; the previous state stays."""
        if checkpoint is None:
            return
        tensors = {f"parameters.{key}": parameter.detach() for key, parameter in self.parameters.items()}
        tensors |= {f"best.{key}": tensor for key, tensor in self.best.items()}
        for key, optimizer in self.optimizers.items():
            for number, state in optimizer.state_dict()["state"].items():
                tensors |= {f"{key}.{number}.{field}": tensor for field, tensor in state.items()}
        history = [asdict(record) for record in self.history]
        progress = {"step": self.step, "history": history, "checks": self.checks}
        compared = {str(step): losses for step, losses in self.compared.items()}
        checkpoint.write(name, tensors, {**progress, "compared": compared})

    def load(self, checkpoint: Checkpoint | None, name: str) -> None:
        """Resume from what was saved last under `name`, if anything.

        Raises:
            ConfigError: the file is damaged.
        """
        if checkpoint is None or (saved := checkpoint.read(name)) is None:
            return
        tensors, progress = saved
        try:
            for key, parameter in self.parameters.items():
                tensor = tensors[f"parameters.{key}"]
                if tensor.shape != parameter.shape:
                    raise ValueError(f"{key} must be {list(parameter.shape)}, found {list(tensor.shape)}")
                parameter.detach().copy_(tensor)
            self.history = [StepRecord(**record) for record in progress["history"]]
            self.step = int(progress["step"])
            for key, optimizer in self.optimizers.items() if self.step else ():  # before, they have no state
                _load_optimizer(key, optimizer, tensors)
            self.checks = [float(loss) for loss in progress["checks"]]
            self.best = {key: tensors[f"best.{key}"] for key in self.parameters} if self.checks else {}
            self.compared = {int(step): list(map(float, each)) for step, each in progress.get("compared", {}).items()}
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise checkpoint.damaged(name, error) from error


def step_loss(problem: TrainingProblem, settings: TrainingSettings, memory: TensorMemory, step: int) -> Tensor:
    """Mean NLL of `memory` on the batch of step number `step`: []."""
    questions, device = problem.training, problem.scorer.backbone.device.type
    rows = batch_rows(len(questions), settings.batch_size, settings.seed, (2, step))
    used, prior = reachable(memory, problem.log_prior[rows])
    terms = questions.terms(used, rows, prior)
    with torch.autocast(device, torch.bfloat16, enabled=settings.precision == "bfloat16"):
        losses = problem.scorer.losses([questions.examples[row] for row in rows], used, terms)  # [rows]
    return losses.sum() / len(rows)


def log_prior(examples: Sequence[Example], entries: Sequence[EntryRecord]) -> Tensor:
    """[n, K] float32: -inf for the entry made of an example, 0 for the others; one that is alone stays."""
    own = np.array([[e.source_digest == entry.source_digest for entry in entries] for e in examples])  # [n, K] bool
    forbidden = own & ~own.all(axis=1, keepdims=True)
    return torch.zeros(own.shape).masked_fill(torch.from_numpy(forbidden), -math.inf)


def reachable(memory: TensorMemory, log_prior: Tensor) -> tuple[TensorMemory, Tensor]:
    """The memory and the prior [n, K] without entries that none of the n questions may retrieve."""
    used = (log_prior > -math.inf).any(dim=0)  # [K] bool
    if bool(used.all()):
        return memory, log_prior
    payloads: dict[str, Any] = {name: tensor[:, used] for name, tensor in _payloads(memory).items()}
    return replace(memory, retrieval_keys=memory.retrieval_keys[used], **payloads), log_prior[:, used]


def clipped(gradients: dict[str, Tensor]) -> dict[str, Tensor]:
    """The gradients, those of the payloads scaled so that their common norm is at most `MAX_GRADIENT_NORM`."""
    norm = torch.stack([gradient.norm() for name, gradient in gradients.items() if name in PAYLOADS]).norm()
    factor = MAX_GRADIENT_NORM / norm.clamp(min=MAX_GRADIENT_NORM)
    return {name: g * factor if name in PAYLOADS else g for name, g in gradients.items()}


def require_storable(memory: TensorMemory) -> None:
    """Raises BundleError: a payload is outside the range of float16."""
    limit = torch.finfo(torch.float16).max
    for name, tensor in _payloads(memory).items():
        if (largest := float(tensor.abs().max())) > limit:
            raise BundleError(
                f"refined {name} reach {largest:.4g}, a bundle's float16 holds {limit:.4g}: "
                "take fewer steps, or a lower rate"
            )


def _payloads(memory: TensorMemory) -> dict[str, Tensor]:
    """[L, K, J, ...] each."""
    return {name: tensor for name in PAYLOADS if (tensor := getattr(memory, name)) is not None}


def _initial_parameters(problem: TrainingProblem) -> dict[str, Tensor]:
    """The payloads [L, K, J, ...], phi [1 + L], layer_bias [L]; float32."""
    memory = problem.memory
    gates = memory.value_gates.double().clamp(max=1 - 1e-6)
    phi = torch.cat([memory.temperature.double().expm1().log()[None], (gates / (1 - gates)).log()])
    payloads = {name: tensor.clone() for name, tensor in _payloads(memory).items()}
    return {**payloads, "phi": phi.float(), "layer_bias": memory.layer_bias.clone()}


def _memory(problem: TrainingProblem, parameters: dict[str, Tensor]) -> TensorMemory:
    payloads: dict[str, Any] = {name: parameters[name] for name in PAYLOADS if name in parameters}
    if found := problem.preconditioner:
        payloads["payload_values"] = found.values_of(payloads["payload_values"])
        if "map_out" in payloads:
            payloads["map_out"] = found.map_out_of(payloads["map_out"])
    memory = replace(problem.memory, **payloads)
    if not problem.calibrate:
        return memory
    return replace(
        memory,
        temperature=temperature(parameters["phi"]),
        value_gates=value_gates(parameters["phi"]),
        layer_bias=parameters["layer_bias"],
    )


def _load_optimizer(key: str, optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
    """From `tensors` named "KEY.NUMBER.FIELD", as `Training.save` writes them."""
    state: dict[int, dict[str, Any]] = {}
    for name, tensor in tensors.items():
        prefix, _, rest = name.partition(".")
        if prefix == key:
            number, _, field = rest.partition(".")
            state.setdefault(int(number), {})[field] = tensor
    expected = sum(len(group["params"]) for group in optimizer.param_groups)
    if len(state) != expected:
        raise ValueError(f"expected {key}'s state of {expected} parameters, found {len(state)}")
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
