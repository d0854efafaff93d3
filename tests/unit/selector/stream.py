"""`inducekv-select` over a stream of tasks, with all outputs in one folder."""

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inducekv_vllm.bundle import Bundle, read_bundle
from selector.cli.select import main

SELECT = "selector.cli.select"
ENVIRONMENT = os.environ | {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
# A model of random weights knows no task: whether its memory is any good is a matter of chance. The same dates make the
# same digests.
SMALL = ("--payload-tokens", "2", "--allow-worse", "--created", "2026-01-31")
PAPER = ("--recipe", "paper", "--budget", "3", "--iterations", "2", "--inner-steps", "1", *SMALL)
FIXED = ("--beta", "0.5", "--gamma", "0.1")  # no grid search
STEPS = ("--steps", "4", "--batch-size", "4", "--learning-rate", "0.05", *SMALL)
REFINED = ("--form", "merged", "--entries-per-task", "2", *STEPS)


@dataclass(frozen=True)
class Stream:
    """The update of TASK writes FOLDER/TASK.safetensors."""

    folder: Path
    model: Path
    tasks: dict[str, Path]  # the data, by name
    options: tuple[str, ...] = (*PAPER, *FIXED)  # of every update

    def arguments(self, task: str, *more: str, previous: str | None = None) -> list[str]:
        files = ["--model", str(self.model), "--task", str(self.tasks[task]), "--output", str(self.output(task))]
        if previous:
            files += ["--previous", str(self.output(previous))]
        return [*files, *self.options, *more]

    def run(self, task: str, *more: str, previous: str | None = None) -> int:
        """The exit status."""
        return main(self.arguments(task, *more, previous=previous))

    def update(self, task: str, *more: str, previous: str | None = None) -> Bundle:
        assert self.run(task, *more, previous=previous) == 0
        return self.bundle(task)

    def refuse(self, task: str, *more: str, previous: str | None = None) -> str:
        """The last line on standard error of an update that must fail."""
        with contextlib.redirect_stderr(io.StringIO()) as printed:
            assert self.run(task, *more, previous=previous) == 2
        line = printed.getvalue().strip().splitlines()[-1]
        assert line.startswith("inducekv-select: error: ")
        return line

    def output(self, task: str) -> Path:
        return self.folder / f"{task}.safetensors"

    def bundle(self, task: str) -> Bundle:
        return read_bundle(self.output(task))

    def report(self, task: str) -> dict[str, Any]:
        return json.loads((self.folder / f"{task}.report.json").read_text())

    def progress(self, task: str) -> Path:
        return self.folder / f".{task}.safetensors.progress"


def kill_when(condition: Callable[[], Any], module: str, *arguments: str) -> None:
    """Run a module as a program, and kill it as soon as the condition holds."""
    run = [sys.executable, "-m", module, *arguments]
    with subprocess.Popen(run, env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        while not condition() and process.poll() is None:
            time.sleep(0.002)
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL, "it ended before it could be killed"


def full_disk(*_: Any, **__: Any) -> None:
    """Takes the place of a function that writes."""
    raise OSError(28, "No space left on device")


def stop(*_: Any, **__: Any) -> None:
    """Takes the place of a function during which the user stops the program."""
    raise KeyboardInterrupt
