"""A document as the model reads it, and what is left of its keys and values.

A text that half of the model's context does not hold is read in parts, each as if it alone stood before a request.

Shapes: N tokens of the text, L layers, J KV heads, D and V sizes of a key and a value, m tokens of the memory.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any, Final

import torch
from torch import Tensor

from inducekv_vllm.backbone.turns import message
from inducekv_vllm.errors import TaskDataError

from ..backbone.generation import score
from ..backbone.injection import TensorMemory
from ..backbone.model import Backbone, Inputs
from ..backbone.prefix import cached_at
from ..backbone.scoring import Scorer
from ..backbone.tiled_attention import tiled_attention
from ..data.document import Document
from ..data.examples import Example
from ..runtime.running import Run
from .chunks import chunks_of, spread
from .compaction import Part, compacted, memory_of
from .pictures import MARK, Illustrated, Picture, described, embedded, without_marks
from .questions import question
from .references import LONG, LONG_PART, PART, Turn, count_of, ids_of, references, repeat, turns_about
from .settings import DocumentSettings
from .training import trained

LEAST_TOKENS: Final = 128  # of a document: less is a prompt, or a fact
READ: Final = 8192  # tokens of a reading, at most
BLOCK: Final = 512  # tokens that are compacted together, at most
PIECE: Final = 256  # tokens of a piece, which is asked about
REFERENCES: Final = 1536  # tokens that ask about all blocks, about
SCORED, BEGUN = 4, 32  # pieces, and tokens of each, whose log-probability tells what was lost


@dataclass(frozen=True)
class Block:
    """A part of a text that is compacted by itself, and the pieces of it."""

    token_ids: Tensor  # [N] int64
    text: str  # without its pictures
    pieces: list[str]
    pictures: Sequence[Picture] = ()
    inputs: Inputs = field(default_factory=dict)  # what the processor has made of its pictures


@dataclass(frozen=True)
class Text:
    """A document in the model's tokens."""

    document: Document
    readings: list[list[Block]]  # of each, the blocks are read behind one another

    @classmethod
    def of(cls, backbone: Backbone, document: Document) -> Text:
        """In one reading, if half of the context holds it; else in as few as there can be.

        Raises:
            TaskDataError: it has too few tokens; and as `Illustrated.of`.
        """
        shown = Illustrated.of(backbone, document)
        left = iter(shown.pictures)

        def block(text: str, first: bool) -> Block:
            pictures = list(itertools.islice(left, text.count(MARK)))
            inputs = shown.encoded(f"{text}\n\n", pictures, first)  # with BOS, if there is one
            ids, said = inputs.pop("input_ids")[0].cpu(), without_marks(text)
            pieces = chunks_of(said, partial(count_of, backbone), PIECE)
            return Block(ids, said, pieces, pictures, inputs)

        readings = [
            [block(part, at == 0) for at, part in enumerate(chunks_of(each, shown.count, BLOCK))]
            for each in chunks_of(shown.text, shown.count, min(READ, Scorer(backbone).context // 2))
        ]
        found = cls(document, readings)
        if found.tokens < LEAST_TOKENS:
            raise TaskDataError(
                f"the document {document.name!r} has {found.tokens} tokens, expected {LEAST_TOKENS} at least: put it "
                "into the prompt, or teach it as facts"
            )
        return found

    @property
    def name(self) -> str:
        return self.document.name

    @property
    def blocks(self) -> list[Block]:
        return [block for reading in self.readings for block in reading]

    @property
    def tokens(self) -> int:
        return sum(len(block.token_ids) for block in self.blocks)

    @property
    def pieces(self) -> list[str]:
        return [piece for block in self.blocks for piece in block.pieces]


@dataclass(frozen=True)
class ReadText:
    """A text with the keys and values that the model has of it, and what asks about it."""

    text: Text
    memories: list[TensorMemory]  # of each block
    turns: list[Turn]  # of all blocks
    references: list[list[Tensor]]  # of each block: its turns, see `references`
    nats: dict[str, float]  # of a token of the text that is to be repeated: with nothing, and with all of it

    @classmethod
    def of(cls, backbone: Backbone, text: Text) -> ReadText:
        memories = [memory for reading in text.readings for memory in read(backbone, reading)]
        pieces = spread(text.pieces, SCORED)
        nats = {"nothing": nats_of(backbone, pieces, None), "whole": nats_of(backbone, pieces, joined(memories))}
        part = PART if text.tokens <= LONG else LONG_PART
        kinds = [
            (*turns_about(backbone, block.text, REFERENCES * len(block.token_ids) // text.tokens, part), pictures)
            for block in text.blocks
            for pictures in [described(backbone, block.pictures)]
        ]
        turns = [turn for of_block in kinds for of_kind in of_block for turn in of_kind]
        return cls(text, memories, turns, [references(backbone, *each) for each in kinds], nats)

    @property
    def examples(self) -> list[Example]:
        """The turns, each as a question with its answer."""
        return [question(turn.asked, turn.said, self.text.name, f"turn/{at}") for at, turn in enumerate(self.turns)]

    def measured(
        self, backbone: Backbone, keys: Tensor, values: Tensor, attention: float | None, steps: int = 0
    ) -> CompactedText:
        """What is left, with what the text's pieces have by it of log-probability; the other fields are given.

        Args:
            keys: [L, J, m, D].
            values: [L, J, m, V].
        """
        memory = memory_of(keys, values, backbone.hidden_size)
        nats = nats_of(backbone, spread(self.text.pieces, SCORED), memory)
        return CompactedText(self.text, keys, values, attention, self.nats | {"kept": nats}, steps)


@dataclass(frozen=True)
class CompactedText:
    """What is left of a text."""

    text: Text
    keys: Tensor  # [L, J, m, D]
    values: Tensor  # [L, J, m, V]
    attention: float | None  # of what the text adds to attention's outputs, the share that is lost; None: not measured
    nats: dict[str, float]  # of a token of the text that is to be repeated: with nothing, with all of it, and with this
    steps: int = 0  # through the model, after what attention lost was measured

    @property
    def text_lost(self) -> float:
        """Of what the text adds to its own log-probability, the share that is lost."""
        gain = self.nats["nothing"] - self.nats["whole"]
        return (self.nats["kept"] - self.nats["whole"]) / gain if gain else 0.0

    @property
    def report(self) -> dict[str, Any]:
        """As JSON values."""
        lost = {"attention": self.attention, "log_probability": self.text_lost}
        sizes = {"tokens": self.text.tokens, "kept": self.keys.shape[2], "steps": self.steps}
        return sizes | {"lost": lost, "nats_of_a_token": self.nats}

    def __str__(self) -> str:
        before, after = (f" before {self.steps} steps", " after them") if self.steps else ("", "")
        of_attention = "" if self.attention is None else f"{self.attention:.1%} of attention's output{before} and "
        return f"loses {of_attention}{self.text_lost:.1%} of its own log-probability{after}"


def compacted_text(backbone: Backbone, whole: ReadText, m: int) -> CompactedText:
    """m tokens for all of a text's: each block has its share of them."""
    text = whole.text
    ends = [round(m * end / text.tokens) for end in itertools.accumulate(len(each.token_ids) for each in text.blocks)]
    parts = [
        Part(memory, asking, end - begin)
        for memory, asking, (begin, end) in zip(whole.memories, whole.references, pairwise([0, *ends]), strict=True)
        if end > begin
    ]
    found = compacted(backbone, parts)
    return whole.measured(backbone, found.keys, found.values, float(found.lost.mean()))


def trained_text(
    backbone: Backbone, whole: ReadText, found: CompactedText, settings: DocumentSettings, run: Run, name: str
) -> CompactedText:
    """After `settings.steps` steps on the text's turns. Raises as `trained` does."""
    memory = memory_of(found.keys, found.values, backbone.hidden_size)
    left = trained(backbone, memory, whole.examples, settings, run, name)
    keys, values = left.payload_keys[:, 0], left.payload_values[:, 0]
    return whole.measured(backbone, keys, values, found.attention, settings.steps)


def read(backbone: Backbone, blocks: Sequence[Block]) -> list[TensorMemory]:
    """The keys and values of each block's tokens, when all stand in front of a request, whose position is 0."""
    if any(block.pictures for block in blocks):
        embeddings, positions = embedded(
            backbone, [block.inputs | {"input_ids": block.token_ids[None]} for block in blocks]
        )
        cached = cached_at(backbone, positions, inputs_embeds=embeddings)
    else:
        ids = torch.cat([block.token_ids for block in blocks])[None]
        cached = cached_at(backbone, torch.arange(-ids.shape[1], 0)[None], input_ids=ids)
    sizes = [len(block.token_ids) for block in blocks]
    keys, values = (torch.split(each[:, 0], sizes, dim=2) for each in (cached.keys, cached.values))
    return [memory_of(*pair, backbone.hidden_size) for pair in zip(keys, values, strict=True)]


@torch.no_grad()
def nats_of(backbone: Backbone, pieces: Sequence[str], memory: TensorMemory | None) -> float:
    """The NLL of a token of the pieces, when the model is to repeat them."""
    prompts = [backbone.encode([message("user", repeat(piece))], []) for piece in pieces]
    answers = [ids_of(backbone, piece)[:BEGUN] for piece in pieces]
    terms = None if memory is None else memory.terms(memory.retrieval_keys.expand(len(pieces), -1))
    with tiled_attention(backbone):
        found = torch.cat(score(backbone, prompts, answers, memory, terms))
    return -float(found.mean())


def joined(memories: Sequence[TensorMemory]) -> TensorMemory:
    """One entry of the tokens of all."""
    keys, values = ([getattr(each, name)[:, 0] for each in memories] for name in ("payload_keys", "payload_values"))
    return memory_of(torch.cat(keys, dim=2), torch.cat(values, dim=2), memories[0].retrieval_keys.shape[1])
