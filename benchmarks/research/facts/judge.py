"""A model that judges pairs of questions, in transformers and bfloat16; what it has said is kept, to go on with."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import torch

from inducekv_vllm.judge import Pair
from inducekv_vllm.judge.ability import Ability, known_pairs
from selector.backbone.judging import BackboneJudge
from selector.backbone.model import Backbone
from selector.runtime.progress import track

KEPT_AT_ONCE: Final = 32  # pairs


class PairJudge:
    """See the module docstring."""

    def __init__(self, model: str, file: Path | None) -> None:
        """`file` of JSON lines, of this model and the package's prompt alone."""
        self._judge = BackboneJudge(Backbone.load(model, torch.bfloat16))
        self._file = file
        lines = file.read_text(encoding="utf-8").splitlines() if file is not None and file.exists() else []
        rows = map(json.loads, lines)
        self._known = {Pair(row["stored"], row["asked"]): row["odds"] for row in rows}  # of its two directions
        known = [each.pair for each in known_pairs()]  # all: benchmarks compare models that are not able, too
        self._ask(known)
        self.ability: Ability = self._judge.judged.measured([each for pair in known for each in self._known[pair]])

    @property
    def threshold(self) -> float:
        return self._judge.judged.threshold

    def odds(self, pairs: Sequence[Pair]) -> dict[Pair, float]:
        self._ask(pairs)
        judged = self._judge.judged
        odds = {pair: self._known[pair][0] for pair in pairs}
        judged.take(odds, {pair: self._known[pair][1] for pair in judged.open(odds)})
        return judged.known(pairs)

    def _ask(self, pairs: Sequence[Pair]) -> None:
        """In both directions, those that are not known."""
        new = sorted({pair for pair in pairs if pair not in self._known}, key=lambda pair: len("".join(pair)))
        for at in track(range(0, len(new), KEPT_AT_ONCE), "Judging", shown=bool(new)):
            part = new[at : at + KEPT_AT_ONCE]
            said = self._judge.said(self._judge.judged.both_ways(part))
            found = {pair: said[2 * n : 2 * n + 2] for n, pair in enumerate(part)}
            self._known.update(found)
            if self._file is not None:
                rows = (json.dumps({**pair._asdict(), "odds": odds}) for pair, odds in found.items())
                with self._file.open("a", encoding="utf-8") as lines:
                    lines.writelines(f"{row}\n" for row in rows)
