"""Questions asked in this process: transformers, float32, greedy, a batch at a time."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from peft import PeftModel

from benchmarks.research.continual.answering.plans import Plan, plan
from benchmarks.research.continual.methods import Artifact
from benchmarks.research.continual.named import outside
from benchmarks.research.continual.suites.suite import NEW_TOKENS
from inducekv_vllm.bundle import read_bundle
from selector.backbone.bundled_model import BundledModel
from selector.backbone.model import Backbone
from selector.backbone.scoring import Scorer
from selector.data.examples import Example

ONLY_ADAPTER = "default"


@dataclass(frozen=True)
class OfflineAnswerer:
    """Answers of the model in a folder, with the artifact of a method."""

    model: Path
    new_tokens: int = NEW_TOKENS  # that an answer may have
    batch_size: int = 64

    def prepare(self, artifact: Artifact, state: Path) -> OfflineModel:
        backbone = Backbone.load(self.model)
        scorer = Scorer(backbone, batch_size=self.batch_size)
        own = state / (artifact.path or "")
        bundle = read_bundle(own) if artifact.kind == "bundle" else None
        folders = {}
        if artifact.kind in ("adapter", "gated_adapter"):
            folders = {ONLY_ADAPTER: own}
        if artifact.kind == "gated_adapters":
            folders = {folder.name: folder for folder in sorted(own.iterdir())}
        if artifact.attach is not None:
            outside(artifact.attach)(backbone, own)
        chosen = plan(artifact, state, self.model, lambda _: backbone, self.new_tokens)
        return OfflineModel(chosen, BundledModel(scorer, bundle), attached(backbone, folders), self.new_tokens)


@dataclass(frozen=True)
class OfflineModel:
    """A backbone: as it stands, with a memory, or with one of its adapters."""

    plan: Plan
    bundled: BundledModel  # the backbone, with a bundle if the artifact is one
    adapters: PeftModel | None = None  # around the backbone's model
    new_tokens: int = NEW_TOKENS

    def answers(self, examples: Sequence[Example]) -> list[str]:
        with self._using(with_artifact=False, adapter=None):
            asks = self.plan.asks(examples)
        texts = [ask.answer or "" for ask in asks]
        groups: dict[tuple[bool, str | None], list[int]] = defaultdict(list)
        for row, ask in enumerate(asks):
            if ask.answer is None:
                groups[ask.with_artifact, ask.adapter].append(row)
        for (with_artifact, adapter), rows in groups.items():
            bundled = self.bundled if with_artifact else replace(self.bundled, bundle=None)
            with self._using(with_artifact, adapter):
                answers = bundled.answers([asks[row].conversation for row in rows], self.new_tokens)
            for row, text in zip(rows, answers, strict=True):
                texts[row] = text
        return texts

    def _using(self, with_artifact: bool, adapter: str | None) -> contextlib.AbstractContextManager[None]:
        """Inside, the backbone runs with that adapter, or without any."""
        if self.adapters is None:
            return contextlib.nullcontext()
        if not with_artifact:
            return self.adapters.disable_adapter()
        self.adapters.set_adapter(adapter or ONLY_ADAPTER)
        return contextlib.nullcontext()


def attached(backbone: Backbone, folders: Mapping[str, Path]) -> PeftModel | None:
    """The backbone's model with the adapters of these folders by name, or None for no adapter."""
    adapters: PeftModel | None = None
    for name, folder in folders.items():
        if adapters is None:
            adapters = PeftModel.from_pretrained(backbone.model, str(folder), name)
        else:
            adapters.load_adapter(str(folder), name)
    return adapters
