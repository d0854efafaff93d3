"""A document as a memory of SmolLM2-135M, against the document in the prompt, retrieved pieces, LoRA, and nothing.

    python -m benchmarks.document --document reference --work DIR --output benchmarks/results/document_reference.json

Each row is kept in DIR when it is done, and a command that is repeated goes on behind it.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from benchmarks.document.asked import HeldOut, beside, recovered
from benchmarks.document.documents import DOCUMENTS
from benchmarks.document.lora import learned_lora
from benchmarks.document.retrieval import retriever
from benchmarks.lora_adapter import largest_rank, save
from benchmarks.real.model import model_folder
from benchmarks.record import keep, parser_of
from inducekv_vllm.backbone.footprint import footprint_bytes
from selector.backbone.model import Backbone
from selector.backbone.scoring import Scorer
from selector.backbone.tiled_attention import tiled_attention
from selector.data.document import Document
from selector.document.settings import DocumentSettings
from selector.document.study import Studied, self_study
from selector.document.teacher import logprobs_beside
from selector.document.update import StudiedQuestions, candidates, divided, pieces_of, questions_of, tokens_of
from selector.refined.candidates import Search, best_of
from selector.runtime.checkpoint import Checkpoint
from selector.runtime.running import Run

SHARES: Final = (16, 4, 64)
SECONDS: Final = "seconds"  # beside the rows
TRAINED: Final = {"asked": 1, "clozes": 5, "continuations": 6}  # questions of each piece


def main(arguments: Sequence[str] | None = None) -> None:
    parser = document_parser(__doc__)
    parser.add_argument("--rows", nargs="*", help="which to compute (default: all)")
    options = parser.parse_args(arguments)
    compared = Compared(options, DOCUMENTS[options.document]())
    for name in options.rows or [*compared.rows, SECONDS]:
        compared.row(name)
    keep(compared.table(), options.output)


def document_parser(description: str | None) -> argparse.ArgumentParser:
    """What the comparison and its serving part are told alike."""
    parser = parser_of(description)
    parser.add_argument("--document", choices=list(DOCUMENTS), required=True)
    parser.add_argument("--work", type=Path, required=True, help="where rows are kept")
    parser.add_argument("--steps", type=int, default=100, help="of a training (%(default)s)")
    parser.add_argument("--rate", type=float, default=0.1, help="of a memory's training (%(default)s)")
    parser.add_argument("--held-out", type=int, default=30, help="questions of each group (%(default)s)")
    parser.add_argument("--times", type=int, default=1, help="as many sentences of a piece to train on (%(default)s)")
    return parser


class Compared:
    """The rows of one document."""

    def __init__(self, options: argparse.Namespace, document: Document) -> None:
        self.options, self.document = options, document
        self.backbone = Backbone.load(model_folder())
        self.scorer = Scorer(self.backbone, batch_size=8)
        self.token_ids = tokens_of(self.backbone, document)
        trained = {kind: number if kind == "asked" else number * options.times for kind, number in TRAINED.items()}
        self.settings = DocumentSettings(**trained, form="merged", start="first", learning_rate=options.rate)
        self.pieces = pieces_of(self.backbone, document, self.settings)
        options.work.mkdir(parents=True, exist_ok=True)
        self.studied = self._studied(self.settings)
        self.training, self.validation = divided(self.studied, 0)
        asked = self._studied(self._settings(seed=1, clozes=0, continuations=0))
        self.held_out = HeldOut.of(document, self.pieces, self.studied, asked, options.held_out)
        self.rows: dict[str, Callable[[], dict[str, Any]]] = {
            "nothing": lambda: self.measured(self.scorer.predicted),
            "document in the prompt": lambda: self._in_prompt(lambda asked: self.document.text),
            "retrieved pieces": lambda: self._in_prompt(retriever(self.pieces)),
        }
        for start in ("first", "pooled"):
            for share in SHARES:
                self.rows[f"memory 1/{share}, untrained, {start}"] = lambda s=share, k=start: self._memory(s, k, 0)
        for share in SHARES:
            self.rows[f"memory 1/{share}"] = lambda s=share: self._memory(s, "first", options.steps)
            self.rows[f"LoRA, bytes of 1/{share}"] = lambda s=share: self._lora(s, options.steps)

    def row(self, name: str) -> dict[str, Any]:
        found = self._kept(name, self._seconds if name == SECONDS else self.rows[name])
        print(name, json.dumps(found), flush=True)
        return found

    def table(self) -> dict[str, Any]:
        rows = {name: found for name in self.rows if (found := self._read(name)) is not None}
        if {"nothing", "document in the prompt"} <= rows.keys():
            ends = (rows["nothing"]["asked"], rows["document in the prompt"]["asked"])
            rows = {n: row | {"recovered": recovered(row["asked"], *ends)} for n, row in rows.items()}
        return {
            "document": self.options.document,
            "title": self.document.name,
            "tokens": len(self.token_ids),
            "pieces": len(self.pieces),
            "training questions": len(self.training),
            "times": self.options.times,
            "steps": self.options.steps,
            SECONDS: self._read(SECONDS),
            "rows": rows,
        }

    def bytes_of(self, share: int) -> int:
        sizes = (self.backbone.hidden_size, self.backbone.num_layers, self.backbone.num_kv_heads)
        return footprint_bytes(1, *sizes, len(self.token_ids) // share, self.backbone.head_dim, self.backbone.value_dim)

    def measured(self, predict: Callable[[Sequence[Any]], Sequence[Tensor]]) -> dict[str, Any]:
        examples, found = self.held_out.examples, list[Tensor]()
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=self.settings.precision == "bfloat16"):
            for start in range(0, len(examples), self.scorer.batch_size):
                found += predict(examples[start : start + self.scorer.batch_size])
        return {"asked": self.held_out.measured(self.scorer, [each.float() for each in found])}

    def _in_prompt(self, text_for: Callable[[str], str]) -> dict[str, Any]:
        def predict(examples: Sequence[Any]) -> list[Tensor]:
            texts = [text_for(each.messages[0]["content"][0]["text"]) for each in examples]
            behind = [beside(text, each) for text, each in zip(texts, examples, strict=True)]
            return list(logprobs_beside(self.scorer, behind))

        return self.measured(predict) | {"mb": len(self.document.text.encode()) / 1e6}

    def learned(self, share: int, start: str, steps: int) -> tuple[DocumentSettings, Search]:
        """A memory of a share of the document's tokens; it is trained once."""
        settings = self._settings(payload_tokens=len(self.token_ids) // share, steps=steps, start=start)
        checkpoint, _ = Checkpoint.open(self.options.work / f"memory-{share}-{start}-{steps}", settings.model_dump())
        with tiled_attention(self.backbone):
            studied = StudiedQuestions(self.training, self.validation)
            begun = candidates(self.backbone, self.token_ids, studied, settings)
            return settings, best_of(begun, Run(checkpoint, progress=steps > 0))

    def _memory(self, share: int, start: str, steps: int) -> dict[str, Any]:
        began = time.process_time()
        settings, search = self.learned(share, start, steps)
        memory, seconds = search.memory, time.process_time() - began
        with tiled_attention(self.backbone):

            def predict(examples: Sequence[Any]) -> list[Tensor]:
                terms = questions_of(examples, memory).terms(memory, slice(None), None)
                return self.scorer.predicted(examples, memory, terms)

            found = self.measured(predict)
        return found | {"mb": self.bytes_of(share) / 1e6, "tokens": settings.payload_tokens, "seconds": seconds}

    def _lora(self, share: int, steps: int) -> dict[str, Any]:
        """Of the largest rank that takes no more bytes than the memory."""
        rank = largest_rank(self.backbone, self.bytes_of(share))
        adapted, costs = learned_lora(self.backbone, self.training, self._settings(steps=steps), rank)
        found = self.measured(self.scorer.predicted)
        shutil.rmtree(folder := self.options.work / f"lora-{share}-{steps}", ignore_errors=True)
        save(adapted, folder)
        adapted.unload()
        return found | costs

    def _seconds(self) -> dict[str, float]:
        """Of one core: the self-study of a piece, and a forward pass over the document, a piece and a question."""
        began = time.process_time()
        read = self._settings(seed=2)
        self_study(self.backbone, self.pieces[:1], self.document.name, read)
        found = {"study of a piece": time.process_time() - began}
        asked = self.scorer.prefix(self.held_out.examples[0])["input_ids"][0]
        of_piece = torch.tensor(self.backbone.tokenizer(self.pieces[0])["input_ids"])
        for name, ids in (("document", self.token_ids), ("piece", of_piece), ("question", asked)):
            began = time.process_time()
            with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
                self.backbone.model.model(input_ids=ids[None])
            found[f"reading the {name}"] = time.process_time() - began
        return found

    def _settings(self, **changes: Any) -> DocumentSettings:
        return DocumentSettings(**(self.settings.model_dump() | changes))

    def _studied(self, settings: DocumentSettings) -> list[Studied]:
        read = {n: v for n, v in settings.model_dump().items() if n not in ("learning_rate", "form", "start")}
        checkpoint, _ = Checkpoint.open(self.options.work / f"study-{settings.seed}", read)
        return self_study(self.backbone, self.pieces, self.document.name, settings, Run(checkpoint, progress=True))

    def _kept(self, name: str, compute: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        if (found := self._read(name)) is None:
            found = compute()
            self._path(name).write_text(json.dumps(found))
        return found

    def _read(self, name: str) -> dict[str, Any] | None:
        path = self._path(name)
        return json.loads(path.read_text()) if path.exists() else None

    def _path(self, name: str) -> Path:
        return self.options.work / f"{name.replace('/', ' of ')}.json"


if __name__ == "__main__":
    main()
