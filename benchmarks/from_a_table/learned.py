"""What each way learns from the rows, kept in a folder of its own: it is learned once."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import selector
from benchmarks.research.continual.methods import Artifact, RunContext
from benchmarks.research.continual.methods.lora import Lora
from benchmarks.research.continual.methods.neighbours import PromptReplay
from benchmarks.research.continual.suites import TaskData
from inducekv_vllm.bundle import write_bundle
from selector.cli.settings import PRESETS
from selector.data.choice import hold_out
from selector.data.examples import Example
from selector.runtime.files import replace_file
from selector.update.measures import memory_bytes

RATES = (3e-4, 1e-3, 3e-3)
LEARNED = "learned.json"
BASE = "base"  # the untouched model's name on both servers
BUNDLE = "memory.safetensors"
ALL_ROWS = 1 << 20  # a budget that no table fills


class BestLora(Lora):
    """By the validation loss of three rates."""

    def rates(self) -> Sequence[float]:
        return RATES


@dataclass(frozen=True)
class Rows:
    """What is learned from."""

    model: Path
    rows: Sequence[Example]
    base: Sequence[Example]  # for a gate

    def task(self) -> TaskData:
        training, validation = hold_out(self.rows, 0)
        return TaskData(self.rows[0].task, tuple(training), tuple(validation))


Learn = Callable[[Rows, Path], Artifact]


def untouched(rows: Rows, out: Path) -> Artifact:
    return Artifact("none", None, 0, {})


def by_memory(settings: Mapping[str, Any], with_base: bool = False) -> Learn:
    def learn(rows: Rows, out: Path) -> Artifact:
        taught = selector.teach(rows.model, rows.rows, base=rows.base if with_base else (), **settings)
        write_bundle(taught.bundle, out / BUNDLE)
        return Artifact("bundle", BUNDLE, memory_bytes(taught.bundle), {})

    return learn


def by_lora(rank: int, **settings: Any) -> Learn:
    """On all linear layers of the language model, batches of 4 for 200 steps, for each of three rates."""
    method = replace(BestLora(steps=200, batch_size=4, precision="float32", rank=rank), **settings)

    def learn(rows: Rows, out: Path) -> Artifact:
        return method.learn(rows.task(), None, out, RunContext(rows.model, 1, 0, 0, 1))

    return learn


def by_retrieval(rows: Rows, out: Path) -> Artifact:
    """Every row is kept, and the four nearest, by the words of the question, stand before it with their answers."""
    return PromptReplay(key="early").learn(rows.task(), None, out, RunContext(rows.model, ALL_ROWS, 0, 0, 1))


WAYS: Mapping[str, Learn] = {
    "untouched": untouched,
    "memory": by_memory({}),
    "memory, --preset quick": by_memory(PRESETS["quick"]),
    "memory, with base questions": by_memory({}, with_base=True),
    "retrieved rows in the prompt": by_retrieval,
    "LoRA, rank 1": by_lora(1),
    "LoRA, rank 8": by_lora(8),
}


@dataclass(frozen=True)
class Learned:
    """One way, and what it has made."""

    name: str
    folder: Path
    artifact: Artifact
    seconds: float

    @property
    def served_as(self) -> str:
        """The model's name in requests: of a bundle or an adapter its own."""
        return self.folder.name if self.artifact.kind in ("bundle", "adapter") else BASE

    @property
    def path(self) -> Path:
        """What a server loads."""
        return self.folder / str(self.artifact.path)


def learned(name: str, learn: Learn, rows: Rows, work: Path) -> Learned:
    """From the folder of a run that was stopped, or now."""
    folder = work / "".join(c if c.isalnum() else "-" for c in name).strip("-")
    if not (folder / LEARNED).exists():
        shutil.rmtree(folder, ignore_errors=True)  # what a run that was stopped has left
        folder.mkdir(parents=True)
        began = time.perf_counter()
        artifact = learn(rows, folder)
        kept = {"artifact": asdict(artifact), "seconds": round(time.perf_counter() - began, 1)}
        replace_file(folder / LEARNED, json.dumps(kept).encode())
    kept = json.loads((folder / LEARNED).read_bytes())
    return Learned(name, folder, Artifact(**kept["artifact"]), kept["seconds"])
