"""A document as a memory, compacted to a half, a quarter, an eighth and a sixteenth, against other ways to have it.

    python -m benchmarks.document --document pump --work DIR --output benchmarks/results/document_pump.json

Each document has 30 questions for its values; an answer is right if it has the value. Rows: nothing; retrieved pieces
of the document in the prompt; the whole document in the prompt; all of its keys and values in front of the request, as
a cached prefix has them; and what is left of them. Each row is kept in the work folder when it is done.
"""

from __future__ import annotations

import argparse
import json
import re
import time
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import torch

from benchmarks.document.documents import DOCUMENTS, Asked
from benchmarks.document.retrieval import retriever
from benchmarks.real.model import model_folder
from benchmarks.record import keep, parser_of
from inducekv_vllm.backbone.footprint import footprint_bytes
from inducekv_vllm.backbone.turns import message
from selector.backbone.generation import injecting
from selector.backbone.injection import TensorMemory
from selector.backbone.model import Backbone
from selector.backbone.tiled_attention import tiled_attention
from selector.document.chunks import chunks_of
from selector.document.compaction import memory_of
from selector.document.text import CompactedText, ReadText, Text, compacted_text, joined, read

MODEL: Final = "qwen2.5-0.5b"
SHARES: Final = (2, 4, 8, 16)
PIECE: Final = 64  # tokens of a piece that is retrieved
TOKENS: Final = 24  # of an answer, at most
NOTHING, WHOLE, PROMPT, RETRIEVED = "nothing", "whole document, cached", "document in the prompt", "retrieved pieces"
Put = Callable[[str], str]  # what is asked, for a question


def main(arguments: Sequence[str] | None = None) -> None:
    options = document_parser(__doc__).parse_args(arguments)
    compared = Compared(options)
    for name in options.rows or compared.rows:
        print(name, json.dumps(compared.row(name)), flush=True)
    keep(compared.table(), options.output)


def document_parser(description: str | None) -> argparse.ArgumentParser:
    parser = parser_of(description)
    parser.add_argument("--model", default=MODEL, help="of `benchmarks.real.model`, or a folder (%(default)s)")
    parser.add_argument("--document", choices=list(DOCUMENTS), required=True)
    parser.add_argument("--work", type=Path, required=True, help="where rows are kept")
    parser.add_argument("--rows", nargs="*", help="which to compute (default: all)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16", help="of weights (%(default)s)")
    return parser


class Compared:
    """The rows of one document."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.document, self.asked = DOCUMENTS[options.document]()
        self.rows: dict[str, Callable[[], dict[str, Any]]] = {
            NOTHING: lambda: self._measured(None),
            RETRIEVED: lambda: self._measured(None, self.retrieved()),
            PROMPT: lambda: self._measured(None, lambda asked: f"{self.document.text.strip()}\n\n{asked}"),
            WHOLE: lambda: self._whole() | {"mb": self._mb(self.text.tokens)},
        }
        for share in SHARES:
            self.rows[f"1/{share}"] = lambda share=share: self._compacted(share)  # type: ignore[misc]
        options.work.mkdir(parents=True, exist_ok=True)

    @cached_property
    def backbone(self) -> Backbone:
        return Backbone.load(model_folder(self.options.model), getattr(torch, self.options.dtype))

    @cached_property
    def text(self) -> Text:
        return Text.of(self.backbone, self.document)

    def row(self, name: str) -> dict[str, Any]:
        if (found := self._read(name)) is None:
            found = self.rows[name]()
            self._path(name).write_text(json.dumps(found))
        return found

    def table(self) -> dict[str, Any]:
        rows = {name: found for name in self.rows if (found := self._read(name)) is not None}
        return {
            "document": self.options.document,
            "model": Path(self.options.model).name,
            "dtype": self.options.dtype,
            "tokens": self.text.tokens,
            "questions": len(self.asked),
            "rows": rows,
        }

    def _whole(self) -> dict[str, Any]:
        began = time.process_time()
        memory = joined([each for blocks in self.text.readings for each in read(self.backbone, blocks)])
        seconds = time.process_time() - began
        return self._measured(memory) | {"seconds": seconds}

    def _compacted(self, share: int) -> dict[str, Any]:
        began = time.process_time()
        found = self.compacted(share)
        seconds = time.process_time() - began
        memory = memory_of(found.keys, found.values, self.backbone.hidden_size)
        row = self._measured(memory) | {"seconds": seconds, "mb": self._mb(found.keys.shape[2])}
        return row | found.report

    def compacted(self, share: int) -> CompactedText:
        """As `inducekv-select --document` does it."""
        return compacted_text(self.backbone, ReadText.of(self.backbone, self.text), self.text.tokens // share)

    def _measured(self, memory: TensorMemory | None, put: Put = str) -> dict[str, Any]:
        """How many questions are answered right, and what was said to each."""
        said = list[str]()
        batch = 15 if put is str else 4
        for start in range(0, len(self.asked), batch):
            some = self.asked[start : start + batch]
            prompts = [self.backbone.encode([message("user", put(each.question))], []) for each in some]
            terms = None if memory is None else memory.terms(memory.retrieval_keys.expand(len(some), -1))
            inputs = self.backbone.collate(prompts, side="left")
            with tiled_attention(self.backbone), injecting(memory, terms):
                ids = self.backbone.model.generate(
                    **inputs, max_new_tokens=TOKENS, do_sample=False, repetition_penalty=1.0
                )
            said += self.backbone.tokenizer.batch_decode(
                ids[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True
            )
        answers = {each.question: text for each, text in zip(self.asked, said, strict=True)}
        return {"right": sum(is_right(answers[each.question], each) for each in self.asked), "answers": answers}

    def retrieved(self) -> Put:
        """The question behind the pieces that share most words with it."""
        tokenizer = self.backbone.tokenizer
        pieces = chunks_of(self.document.text, lambda text: len(tokenizer(text)["input_ids"]), PIECE)
        find = retriever(pieces)
        return lambda asked: f"{find(asked)}\n\n{asked}"

    def _mb(self, tokens: int) -> float:
        backbone = self.backbone
        sizes = (backbone.hidden_size, backbone.num_layers, backbone.num_kv_heads)
        return footprint_bytes(1, *sizes, tokens, backbone.head_dim, backbone.value_dim) / 1e6

    def _read(self, name: str) -> dict[str, Any] | None:
        path = self._path(name)
        return json.loads(path.read_text()) if path.exists() else None

    def _path(self, name: str) -> Path:
        work: Path = self.options.work
        return work / f"{self.options.document} {Path(self.options.model).name} {name.replace('/', ' of ')}.json"


def is_right(answer: str, asked: Asked) -> bool:
    """Whether a value stands in the answer as a word of its own, in any case."""
    said = answer.casefold()
    return any(re.search(rf"(?<![\w.]){re.escape(value.casefold())}(?!\w|\.\d)", said) for value in asked.values)


if __name__ == "__main__":
    main()
