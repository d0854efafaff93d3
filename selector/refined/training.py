"""Train the chosen entries' keys and values by gradient, under the same bytes; the backbone is frozen.

Payloads are prefix-tuning parameters: Muon updates them. AdamW updates the calibration (temperature, gates, layer bias)
if the problem trains it.

Shapes: K entries of the next memory, L layers, J KV heads, m payload tokens, D head size.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor

from inducekv_vllm.errors import TaskDataError

from ..backbone.injection import Memory
from ..runtime.checkpoint import Checkpoint
from ..runtime.distributed import replicated
from ..update.parametrization import temperature, value_gates
from .early_stopping import is_done
from .losses import Losses, step_losses
from .muon import Muon
from .settings import RefinedSettings
from .training_problem import TrainingProblem

CALIBRATION_RATE: Final = 0.03
MAX_GRADIENT_NORM: Final = 1.0  # of all payloads together
STEPS_BETWEEN_SAVES: Final = 25
MAPS: Final = ("map_in", "map_out")  # if the memory has them
PAYLOADS: Final = ("payload_keys", "payload_values", *MAPS)


@dataclass(frozen=True)
class StepRecord:
    """A step's losses and the calibration before the step."""

    step: int
    current: float
    anchors: float | None
    distillation: float | None
    temperature: float
    value_gate: float  # mean over the layers
    layer_bias: float  # mean over the layers


class Training:
    """Parameters and optimisers of one training run."""

    def __init__(self, problem: TrainingProblem, settings: RefinedSettings, learning_rate: float) -> None:
        self.problem, self.settings, self.learning_rate = problem, settings, learning_rate
        self.parameters = _initial_parameters(problem)
        groups: dict[str, list[Tensor]] = {"muon": [], "muon_maps": [], "adamw": []}
        for name, parameter in self.parameters.items():
            if problem.calibrate or name in PAYLOADS:
                parameter.requires_grad_()
                groups["adamw" if name not in PAYLOADS else "muon_maps" if name in MAPS else "muon"].append(parameter)
        payloads, maps, calibration = groups.values()
        self.optimizers: dict[str, torch.optim.Optimizer] = {"muon": Muon(payloads, lr=learning_rate)}
        if maps:
            # As small beside the rate of the payloads as a map's starting values are beside theirs.
            width = self.parameters["map_in"].shape[-1]
            self.optimizers["muon_maps"] = Muon(maps, lr=learning_rate / math.sqrt(width))
        if calibration:
            self.optimizers["adamw"] = torch.optim.AdamW(
                calibration, lr=CALIBRATION_RATE, weight_decay=0.0, foreach=False
            )
        self.step = 0
        self.history: list[StepRecord] = []
        self.checks: list[float] = []  # validation losses, one for each check
        self.best: dict[str, Tensor] = {}  # the parameters at the check of the least loss

    def memory(self) -> Memory:
        """The K entries as trained so far; after checks, as the best one found them."""
        parameters = self.best or {name: parameter.detach() for name, parameter in self.parameters.items()}
        return _memory(self.problem, parameters)

    def check(self, validation_loss: Callable[[Memory], float]) -> None:
        """Measure the state as it is now, and keep it if it is the best so far. Collective."""
        now = {name: parameter.detach().clone() for name, parameter in self.parameters.items()}
        self.checks.append(validation_loss(_memory(self.problem, now)))
        if self.checks[-1] == min(self.checks):
            self.best = now

    def take_step(self) -> None:
        """One step on a batch of current questions and one of anchors. Collective.

        Raises:
            TaskDataError: a loss or a gradient is not finite.
        """
        trained = {name: parameter for name, parameter in self.parameters.items() if parameter.requires_grad}
        copies = dict(zip(trained, replicated(*trained.values()), strict=True))
        memory = _memory(self.problem, self.parameters | copies)
        losses = step_losses(self.problem, self.settings, memory, self.step)
        total = losses.total(self.settings)
        gradients = torch.autograd.grad(total, list(trained.values()), allow_unused=True)
        by_name = {name: g for name, g in zip(trained, gradients, strict=True) if g is not None}
        if not all(bool(tensor.isfinite().all()) for tensor in (total, *by_name.values())):
            raise TaskDataError(f"the loss or its gradient is not finite in step {self.step}; nothing was written")

        self.history.append(_record(self.step, losses, memory))
        for name, gradient in clipped(by_name).items():
            trained[name].grad = gradient
        decay = 0.5 * (1 + math.cos(math.pi * self.step / self.settings.steps))
        for optimizer in self.optimizers.values():
            for group in optimizer.param_groups:
                group["lr"] = optimizer.defaults["lr"] * decay
            optimizer.step()
            optimizer.zero_grad()
        self.step += 1

    def save(self, checkpoint: Checkpoint, name: str) -> None:
        """Collective. Raises ConfigError: the file cannot be written; the previous state stays."""
        tensors = {f"parameters.{key}": parameter.detach() for key, parameter in self.parameters.items()}
        tensors |= {f"best.{key}": tensor for key, tensor in self.best.items()}
        for key, optimizer in self.optimizers.items():
            for number, state in optimizer.state_dict()["state"].items():
                tensors |= {f"{key}.{number}.{field}": tensor for field, tensor in state.items()}
        history = [asdict(record) for record in self.history]
        progress = {"step": self.step, "history": history, "checks": self.checks}
        checkpoint.write(name, tensors, progress)

    def load(self, checkpoint: Checkpoint, name: str) -> None:
        """Resume from what was saved last under `name`, if anything. Collective.

        Raises:
            ConfigError: the file is damaged.
        """
        saved = checkpoint.read(name)
        if saved is None:
            return
        tensors, progress = saved
        try:
            for key, parameter in self.parameters.items():
                tensor = tensors[f"parameters.{key}"]
                if tensor.shape != parameter.shape:
                    raise ValueError(f"{key} must be {list(parameter.shape)}, found {list(tensor.shape)}")
                parameter.detach().copy_(tensor)
            for key, optimizer in self.optimizers.items():
                _load_optimizer(key, optimizer, tensors)
            self.history = [StepRecord(**record) for record in progress["history"]]
            self.step = int(progress["step"])
            self.checks = [float(loss) for loss in progress["checks"]]
            self.best = {key: tensors[f"best.{key}"] for key in self.parameters} if self.checks else {}
        except (KeyError, TypeError, ValueError) as error:
            raise checkpoint.damaged(name, error) from error


def train(
    training: Training,
    checkpoint: Checkpoint,
    name: str,
    *,
    until: int | None = None,
    after_step: Callable[[Training], None] = lambda training: None,
    validation_loss: Callable[[Memory], float] | None = None,
) -> None:
    """Take all steps, or those before step `until`, resuming from the checkpoint under `name`. Collective.

    Args:
        validation_loss: if given, measured at every save, and training ends early if it no longer falls.

    Raises:
        TaskDataError: a loss or a gradient is not finite.
        ConfigError: the progress cannot be written, or the file is damaged.
    """
    training.load(checkpoint, name)
    last = training.settings.steps if until is None else min(until, training.settings.steps)
    while training.step < last and not is_done(training.checks, training.settings.patience):
        training.take_step()
        if training.step % STEPS_BETWEEN_SAVES == 0 or training.step == last:
            if validation_loss is not None:
                training.check(validation_loss)
            training.save(checkpoint, name)
        after_step(training)


def clipped(gradients: dict[str, Tensor]) -> dict[str, Tensor]:
    """The gradients, those of the payloads scaled so that their common norm is at most `MAX_GRADIENT_NORM`."""
    norm = torch.stack([gradient.norm() for name, gradient in gradients.items() if name in PAYLOADS]).norm()
    factor = MAX_GRADIENT_NORM / norm.clamp(min=MAX_GRADIENT_NORM)
    return {name: g * factor if name in PAYLOADS else g for name, g in gradients.items()}


def _initial_parameters(problem: TrainingProblem) -> dict[str, Tensor]:
    """The payloads of the trained entries [L, trained entries, J, ...], phi [1 + L], layer_bias [L]; float32."""
    memory = problem.memory
    gates = memory.value_gates.double().clamp(max=1 - 1e-6)
    phi = torch.cat([memory.temperature.double().expm1().log()[None], (gates / (1 - gates)).log()])
    payloads = {name: tensor for name in PAYLOADS if (tensor := getattr(memory, name)) is not None}
    return {
        **{name: tensor[:, problem.trainable].clone() for name, tensor in payloads.items()},
        "phi": phi.float(),
        "layer_bias": memory.layer_bias.clone(),
    }


def _memory(problem: TrainingProblem, parameters: dict[str, Tensor]) -> Memory:
    rows = problem.trainable.nonzero()[:, 0]
    payloads: dict[str, Any] = {
        name: getattr(problem.memory, name).index_copy(1, rows, parameters[name])
        for name in PAYLOADS
        if name in parameters
    }
    memory = replace(problem.memory, **payloads)
    if not problem.calibrate:
        return memory
    return replace(
        memory,
        temperature=temperature(parameters["phi"]),
        value_gates=value_gates(parameters["phi"]),
        layer_bias=parameters["layer_bias"],
    )


def _record(step: int, losses: Losses, memory: Memory) -> StepRecord:
    return StepRecord(
        step=step,
        current=float(losses.current.detach()),
        anchors=None if losses.anchors is None else float(losses.anchors.detach()),
        distillation=None if losses.distillation is None else float(losses.distillation.detach()),
        temperature=float(memory.temperature.detach()),
        value_gate=float(memory.value_gates.detach().mean()),
        layer_bias=float(memory.layer_bias.detach().mean()),
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
