"""`--log-dir`: the curves of a task's trainings, for TensorBoard."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from inducekv_vllm.errors import ConfigError

from ..runtime.callback import Callback


class TensorBoard(Callback):
    """Writes events into a folder: the loss of each step and check by training, and at the end the accuracies.

    Raises:
        ConfigError: the package tensorboard is not installed, or the folder cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ConfigError("--log-dir needs the package tensorboard: pip install 'inducekv[tensorboard]'") from error
        try:
            self._writer = SummaryWriter(str(folder), flush_secs=10)
        except OSError as error:
            raise ConfigError(f"--log-dir {folder}: cannot write there: {error.strerror}") from error

    def on_step(self, training: str, step: int, loss: float) -> None:
        self._scalar(f"training/{training}", loss, step)

    def on_check(self, training: str, step: int, loss: float) -> None:
        self._scalar(f"validation/{training}", loss, step)

    def on_end(self, report: dict[str, Any]) -> None:
        for name in ("validation_accuracy", "base_accuracy"):
            for model, label in (("no_memory", "without memory"), ("deployed", "with memory")):
                if report[name] is not None:
                    self._scalar(f"{name.replace('_', ' ')}/{label}", report[name][model], 0)
        self._writer.close()

    def _scalar(self, name: str, value: float, step: int) -> None:
        self._writer.add_scalar(name, value, step)
