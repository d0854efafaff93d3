"""What each way learns from the rows, kept in a folder of its own: it is learned once."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

import selector
from benchmarks.exemplars import EXEMPLARS, KEYS, Neighbours, content_bytes
from benchmarks.lora_adapter import attached_fit, save
from benchmarks.question_keys import question_keys
from inducekv_vllm.bundle import write_bundle
from inducekv_vllm.errors import ConfigError
from selector.backbone.model import Backbone
from selector.data.anchors import AnchorStore
from selector.data.choice import hold_out
from selector.data.examples import Example
from selector.recipes import DEFAULT as RECIPE
from selector.runtime.files import replace_file
from selector.update.measures import memory_bytes

RATES = (3e-4, 1e-3, 3e-3)
LEARNED = "learned.json"
BASE = "base"  # the untouched model's name on both servers
BUNDLE = "memory.safetensors"
ADAPTER = "adapter"
SHOWN = 4  # rows before a question


@dataclass(frozen=True)
class Rows:
    """What is learned from."""

    model: Path
    rows: Sequence[Example]
    base: Sequence[Example]  # for a gate
    rates: Sequence[float] = RATES  # of LoRA

    def split(self) -> tuple[list[Example], list[Example]]:
        """Those that are learned, and the tenth that is held out."""
        return hold_out(self.rows, 0)


@dataclass(frozen=True)
class Artifact:
    """What answers questions beside the model, and its bytes."""

    kind: Literal["none", "bundle", "adapter", "exemplars"]
    path: str | None  # relative to the way's folder
    stored_bytes: int


Learn = Callable[[Rows, Path], Artifact]


def untouched(rows: Rows, out: Path) -> Artifact:
    return Artifact("none", None, 0)


def by_memory(settings: Mapping[str, Any], with_base: bool = False) -> Learn:
    def learn(rows: Rows, out: Path) -> Artifact:
        taught = selector.teach(rows.model, rows.rows, base=rows.base if with_base else (), **settings)
        write_bundle(taught.bundle, out / BUNDLE)
        return Artifact("bundle", BUNDLE, memory_bytes(taught.bundle))

    return learn


def by_lora(rank: int, steps: int = 200) -> Learn:
    """On all linear layers of the language model, in batches of 4: of the rates, the best by validation loss.

    Matrix products are of the precision that memory is trained in.
    """

    def learn(rows: Rows, out: Path) -> Artifact:
        backbone = Backbone.load(rows.model)
        training, validation = rows.split()
        adapted, fit = attached_fit(backbone, rank, training)
        fit.run_best(rows.rates, steps, validation)
        return Artifact("adapter", ADAPTER, save(adapted, out / ADAPTER))

    return learn


def by_retrieval(rows: Rows, out: Path) -> Artifact:
    """Every row is kept, and the four nearest, by the words of the question, stand before it with their answers."""
    backbone = Backbone.load(rows.model)
    training, _ = rows.split()
    neighbours = Neighbours.none(backbone.hidden_size, SHOWN, "early")
    neighbours = neighbours.after(question_keys(backbone, training, "early"))
    neighbours.write(out / KEYS)
    store = AnchorStore(out / EXEMPLARS)
    store.append(training)
    stored = neighbours.stored_bytes + sum(map(content_bytes, store.read()))
    return Artifact("exemplars", EXEMPLARS, stored)


WAYS: Mapping[str, Learn] = {
    "untouched": untouched,
    "memory": by_memory({}),
    "memory, --preset quick": by_memory(RECIPE.presets["quick"]),
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
    cpu_seconds: float | None  # None: it was learned before these were counted

    @property
    def served_as(self) -> str:
        """The model's name in requests: of a bundle or an adapter its own."""
        return self.folder.name if self.artifact.kind in ("bundle", "adapter") else BASE

    @property
    def path(self) -> Path:
        """What a server loads."""
        return self.folder / str(self.artifact.path)


def learned(name: str, learn: Learn, rows: Rows, work: Path) -> Learned:
    """From the folder of a run that was stopped, or now. Raises ConfigError: another version has made the folder."""
    folder = work / "".join(c if c.isalnum() else "-" for c in name).strip("-")
    if not (folder / LEARNED).exists():
        shutil.rmtree(folder, ignore_errors=True)  # what a run that was stopped has left
        folder.mkdir(parents=True)
        began, cpu = time.perf_counter(), time.process_time()
        artifact = learn(rows, folder)
        taken = {"seconds": time.perf_counter() - began, "cpu_seconds": time.process_time() - cpu}
        kept = {"artifact": asdict(artifact)} | {name: round(seconds, 1) for name, seconds in taken.items()}
        replace_file(folder / LEARNED, json.dumps(kept).encode())
    kept = json.loads((folder / LEARNED).read_bytes())
    expected, found = {field.name for field in fields(Artifact)}, set(kept["artifact"])
    if found != expected:
        raise ConfigError(
            f"{folder}: another version of this benchmark has made it ({LEARNED} has {', '.join(sorted(found))}; "
            f"expected {', '.join(sorted(expected))}); start with a new folder for --work"
        )
    return Learned(name, folder, Artifact(**kept["artifact"]), kept["seconds"], kept.get("cpu_seconds"))
