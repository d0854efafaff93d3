"""Suites by name, by file, or "module:NAME": a function that makes one from the data folder.

A suite is data, tasks in their default order and base questions, and what scores answers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from benchmarks.research.continual.named import is_outside, outside
from benchmarks.research.continual.suites import files, made
from benchmarks.research.continual.suites.published import AS_PUBLISHED, LoadOptions, load_published
from benchmarks.research.continual.suites.suite import Suite, TaskData
from benchmarks.research.published.suites import SUITES as PUBLISHED
from inducekv_vllm.backbone.checkpoints import load_config
from inducekv_vllm.errors import ConfigError, UnsupportedModel
from server.demo import CHECKPOINT

SUITES: Mapping[str, Callable[[Path], Suite]] = {
    "demo": made.load_demo,
    "demo-search": made.load_search,
    "real-text": made.load_real_text,
    "real-pictures": made.load_real_pictures,
}

# What prints the folder of the model that a suite is for; the others are for the demo model.
MODELS: Mapping[str, str] = {
    "real-text": "python -m benchmarks.real.model",
    "real-pictures": "python -m benchmarks.research.real_pictures.train",
}

__all__ = [
    "PUBLISHED",
    "SUITES",
    "LoadOptions",
    "Suite",
    "TaskData",
    "load_suite",
    "require_own_model",
    "require_reader",
]


def load_suite(name: str, data: Path, options: LoadOptions = AS_PUBLISHED) -> Suite:
    """The suite of this name from the folder `data`, or that which a file `name` describes.

    Made suites are written there if needed; of published ones the files are there.

    Raises:
        ConfigError: there is no such suite, or what the user wrote makes none.
        TaskDataError: its data cannot be read.
    """
    if Path(name).suffix == ".toml":
        return files.load(Path(name))
    if is_outside(name):
        suite = outside(name)(data)
        if not isinstance(suite, Suite):
            raise ConfigError(f"{name}: expected a function that returns a Suite, found {type(suite).__name__}")
        return suite
    if name in PUBLISHED:
        return load_published(name, data, options)
    if name not in SUITES:
        known = ", ".join((*SUITES, *PUBLISHED))
        raise ConfigError(f"there is no suite {name!r}, there are: {known}, FILE.toml and MODULE:NAME")
    return SUITES[name](data)


def require_own_model(name: str, model: Path) -> None:
    """Raises ConfigError: the suite is for a model of its own, and `model` is the demo's, the default."""
    if name in MODELS and model.resolve() == CHECKPOINT.resolve():
        raise ConfigError(f'suite {name!r} is not for the demo model: --model "$({MODELS[name]})" names its own')


def require_reader(suite: Suite, model: Path) -> None:
    """Raises UnsupportedModel: the folder has no model that can have a memory, or the suite has pictures and it reads
    text alone.
    """
    _, kind = load_config(model)
    pictured = [task.name for task in (*suite.tasks, suite.base) if any(example.images for example in task.examples)]
    if kind == "text" and pictured:
        raise UnsupportedModel(f"{model}: a text-only model, and {pictured[0]} of suite {suite.name!r} has pictures")
