"""A document as a memory, compacted to a half, a quarter, an eighth and a sixteenth, against other ways to have it.

    python -m benchmarks.document --document pump --work DIR --output benchmarks/results/document_pump.json

Each document has 30 questions for its values; an answer is right if it has the value. Rows: nothing; retrieved pieces
of the document in the prompt; the whole document in the prompt; all of its keys and values in front of the request, as
a cached prefix has them, and these when the answer alone sees them; what is left of them; that after steps through the
model (`inducekv-select --steps`), and the same steps from tokens of the text that nothing has fitted, which is
self-study; and a LoRA adapter, which learns the same turns. Each row is kept in the work folder when it is done.
"""

from __future__ import annotations

import argparse
import json
import re
import time
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from pathlib import Path
from statistics import fmean
from typing import Any, Final

import torch

from benchmarks.document.documents import DOCUMENTS, Asked
from benchmarks.document.late import generate_late, score_late
from benchmarks.document.lora import adapted
from benchmarks.document.retrieval import retriever
from benchmarks.real.model import model_folder
from benchmarks.record import keep, parser_of
from inducekv_vllm.backbone.footprint import footprint_bytes
from inducekv_vllm.backbone.turns import message
from selector.backbone.generation import generate, score
from selector.backbone.injection import TensorMemory
from selector.backbone.model import Backbone, Inputs
from selector.backbone.prefix import cached_at
from selector.backbone.tiled_attention import tiled_attention
from selector.cli.loading import load_backbone
from selector.document.chunks import chunks_of
from selector.document.compaction import memory_of
from selector.document.references import ids_of
from selector.document.settings import DocumentSettings
from selector.document.text import CompactedText, ReadText, Text, compacted_text, joined, trained_text
from selector.refined.settings import usual_precision
from selector.runtime.running import Run

MODEL: Final = "qwen2.5-0.5b"
SHARES: Final = (2, 4, 8, 16)
TRAINED: Final = (4, 8, 16)  # of these
STUDIED: Final = 8  # of self-study
STEPS: Final = 40
PIECE: Final = 64  # tokens of a piece that is retrieved
TOKENS: Final = 24  # of an answer, at most
BATCH: Final = 30  # questions
ALONE: Final = " Answer with the value alone."
NOTHING, WHOLE, PROMPT, RETRIEVED = "nothing", "whole document, cached", "document in the prompt", "retrieved pieces"
LATE: Final = "whole document, cached, seen by the answer alone"
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
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of weights (%(default)s)")
    return parser


class Compared:
    """The rows of one document."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.document, self.asked = DOCUMENTS[options.document]()
        self.rows: dict[str, Callable[[], dict[str, Any]]] = {
            NOTHING: lambda: self._measured(None),
            RETRIEVED: lambda: self._measured(None, self.retrieved()),
            PROMPT: self._prompt,
            WHOLE: self._whole,
            LATE: self._late,
        }
        for share in SHARES:
            self.rows[f"1/{share}"] = partial(self._memory, self._compacted, share)
        for share in TRAINED:
            self.rows[f"1/{share}, {STEPS} steps"] = partial(self._memory, self._compacted, share, STEPS)
        self.rows[f"self-study: 1/{STUDIED}, {STEPS} steps"] = partial(self._memory, self._spread, STUDIED, STEPS)
        self.rows["LoRA"] = self._lora
        options.work.mkdir(parents=True, exist_ok=True)

    @cached_property
    def backbone(self) -> Backbone:
        return load_backbone(str(model_folder(self.options.model)), "cpu", self.options.dtype)

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
        for found in rows.values() if NOTHING in rows else ():
            found["gain"] = rows[NOTHING]["nats_of_a_value"] - found["nats_of_a_value"]  # of a value, in nats
        return {
            "document": self.options.document,
            "model": Path(self.options.model).name,
            "dtype": self.options.dtype,
            "tokens": self.text.tokens,
            "questions": len(self.asked),
            "threads": torch.get_num_threads(),
            "rows": rows,
        }

    def _prompt(self) -> dict[str, Any]:
        """What all prompts begin with is computed once, as by a prefix cache."""

        def put(asked: str) -> str:
            return f"{self.document.text.strip()}\n\n{asked}"

        first, last = (self._encoded(put(letter))["input_ids"][0] for letter in "AZ")
        size = int((first != last).nonzero()[0])
        began = Clock()
        cached = cached_at(self.backbone, torch.arange(-size, 0)[None], input_ids=first[None, :size])
        memory = memory_of(cached.keys[:, 0], cached.values[:, 0], self.backbone.hidden_size)
        taken = began.taken
        return self._measured(memory, put, size) | taken

    def _whole(self) -> dict[str, Any]:
        whole, taken = self.read
        return self._measured(joined(whole.memories)) | taken | {"mb": self._mb(self.text.tokens)}

    def _late(self) -> dict[str, Any]:
        backbone, memory, said, nats = self.backbone, joined(self.read[0].memories), list[list[int]](), list[float]()
        for each in self.asked:
            asked, alone = (self._encoded(f"{each.question}{more}") for more in ("", ALONE))
            said.append(generate_late(backbone, asked, TOKENS, memory).token_ids)
            nats.append(-float(score_late(backbone, alone, ids_of(backbone, each.values[0]), memory).sum()))
        return self._answered(backbone.tokenizer.batch_decode(said, skip_special_tokens=True), nats)

    def _memory(self, kept: Callable[[int], CompactedText], share: int, steps: int = 0) -> dict[str, Any]:
        """The text is read once for all shares; its seconds count for each."""
        whole, _ = self.read
        began, found = Clock(), kept(self.text.tokens // share)
        if steps:
            settings = DocumentSettings(steps=steps, precision=usual_precision())
            found = trained_text(self.backbone, whole, found, settings, Run(progress=True), self.options.document)
        taken = self._with_reading(began)
        memory = memory_of(found.keys, found.values, self.backbone.hidden_size)
        return self._measured(memory) | taken | {"mb": self._mb(found.keys.shape[2])} | found.report

    def _compacted(self, m: int) -> CompactedText:
        return compacted_text(self.backbone, self.read[0], m)

    def _spread(self, m: int) -> CompactedText:
        """m of the text's tokens, evenly, as they are."""
        whole, _ = self.read
        memory = joined(whole.memories)
        rows = torch.arange(m) * self.text.tokens // m
        keys, values = (each[:, 0][:, :, rows] for each in (memory.payload_keys, memory.payload_values))
        return whole.measured(self.backbone, keys, values, attention=None)

    def _lora(self) -> dict[str, Any]:
        whole, _ = self.read
        began = Clock()
        with adapted(self.backbone, whole.examples) as size:
            return self._with_reading(began) | {"mb": size / 1e6} | self._measured(None)

    def _with_reading(self, began: Clock) -> dict[str, float]:
        return {name: seconds + self.read[1][name] for name, seconds in began.taken.items()}

    @cached_property
    def read(self) -> tuple[ReadText, dict[str, float]]:
        """As `inducekv-select --document` does it, and the seconds."""
        began = Clock()
        return ReadText.of(self.backbone, self.text), began.taken

    @torch.no_grad()
    def _measured(self, memory: TensorMemory | None, put: Put = str, begun: int = 0) -> dict[str, Any]:
        """How many questions are answered right, what was said to each, and the NLL of a value, asked for alone.

        Args:
            begun: tokens of the prompts that the memory has.
        """
        said, nats, tokenizer = list[str](), list[float](), self.backbone.tokenizer
        for start in range(0, len(self.asked), BATCH):
            some = self.asked[start : start + BATCH]
            prompts, alone = (
                [self._encoded(put(f"{each.question}{more}"), begun) for each in some] for more in ("", ALONE)
            )
            values = [ids_of(self.backbone, each.values[0]) for each in some]
            terms = None if memory is None else memory.terms(memory.retrieval_keys.expand(len(some), -1))
            with tiled_attention(self.backbone):
                found = generate(self.backbone, prompts, TOKENS, memory, terms)
                nats += [-float(each.sum()) for each in score(self.backbone, alone, values, memory, terms)]
            said += tokenizer.batch_decode([each.token_ids for each in found], skip_special_tokens=True)
        return self._answered(said, nats)

    def _answered(self, said: Sequence[str], nats: Sequence[float]) -> dict[str, Any]:
        answers = {each.question: text for each, text in zip(self.asked, said, strict=True)}
        right = sum(is_right(answers[each.question], each) for each in self.asked)
        return {"right": right, "nats_of_a_value": fmean(nats), "answers": answers}

    def _encoded(self, text: str, begun: int = 0) -> Inputs:
        inputs = self.backbone.encode([message("user", text)], [])
        return {name: each[:, begun:] for name, each in inputs.items()}

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


class Clock:
    """Seconds since it was made."""

    def __init__(self) -> None:
        self._wall, self._cpu = time.monotonic(), time.process_time()

    @property
    def taken(self) -> dict[str, float]:
        return {"seconds": time.monotonic() - self._wall, "cpu_seconds": time.process_time() - self._cpu}


def is_right(answer: str, asked: Asked) -> bool:
    """Whether a value stands in the answer as a word of its own, in any case."""
    said = answer.casefold()
    return any(re.search(rf"(?<![\w.]){re.escape(value.casefold())}(?!\w|\.\d)", said) for value in asked.values)


if __name__ == "__main__":
    main()
