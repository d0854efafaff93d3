"""Chat requests of an exact length, each with a prompt, and a picture if it has one, that no other request has."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from transformers import AutoConfig, AutoTokenizer

from benchmarks.chat import Message, question_of, user_turn
from benchmarks.demo.scenes import PICTURE
from benchmarks.demo.world import examples
from benchmarks.serving.cells import Cell
from inducekv_vllm.errors import ConfigError

TASK = "guild"  # of the demo world: whose examples are replayed
EXEMPLARS = 128  # more than the context of the demo model takes


@dataclass(frozen=True)
class Exemplar:
    """One example of task data for a prompt: a picture, a question and the answer."""

    pixels: np.ndarray  # [48, 48, 3] uint8
    question: str
    answer: str


class PromptMaker:
    """Makes the messages of requests from the model's own tokenizer; the same seed makes the same requests."""

    def __init__(self, model: Path, seed: int) -> None:
        self._tokenizer = AutoTokenizer.from_pretrained(model)
        # Of a model for text alone 0: its turns are plain text, which is all that some chat templates take.
        self._image_tokens: int = getattr(AutoConfig.from_pretrained(model), "image_seq_length", 0)
        self._rng = np.random.default_rng(seed)
        pieces = self._tokenizer.get_vocab()
        # Words of one token each, with their leading space, so that a text's length in tokens is its number of words.
        self._words = sorted(p.replace("Ġ", " ") for p in pieces if re.fullmatch("Ġ[a-z]{2,}", p))
        assert len(self._words) >= 20, f"{model}: too few one-word tokens to make prompts of"

    @property
    def takes_pictures(self) -> bool:
        return self._image_tokens > 0

    @cached_property
    def exemplars(self) -> list[Exemplar]:
        found = examples(TASK, "train", EXEMPLARS)
        return [Exemplar(pixels, question_of(record), record["answer"]) for record, pixels in found]

    def length(self, messages: list[Message]) -> int:
        """Tokens of a whole prompt as the model sees it: chat template, pictures, texts and generation prompt."""
        prompt = self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        parts = [part for message in messages for part in message["content"] if isinstance(part, dict)]
        pictures = [part for part in parts if part["type"] == "image_url"]
        ids = self._tokenizer(prompt, add_special_tokens=False).input_ids
        return len(ids) + len(pictures) * (self._image_tokens - 1)

    def question_in(self, cell: Cell, more: int = 0) -> list[Message]:
        """One user turn as the requests of a cell have it, longer by `more` tokens."""
        return self.question(int(self._rng.choice(cell.lengths)) + more, picture=cell.picture)

    def question(self, tokens: int, *, picture: bool) -> list[Message]:
        """One user turn, a prompt of exactly `tokens` tokens; with a picture if the model takes any.

        Raises:
            ConfigError: what is around the words is longer.
        """
        shown = picture and self.takes_pictures
        pixels = self._rng.integers(256, size=(PICTURE, PICTURE, 3), dtype=np.uint8) if shown else None
        around = self.length([self._turn(pixels, "")])
        if tokens < around:
            raise ConfigError(f"a prompt of {tokens} tokens has no room for the {around} around its words")
        messages = [self._turn(pixels, "".join(self._rng.choice(self._words, size=tokens - around)))]
        assert self.length(messages) == tokens, f"made a prompt of {self.length(messages)} tokens, not {tokens}"
        return messages

    def replayed(self, exemplars: int, cell: Cell) -> list[Message]:
        """A question after at most `exemplars` chat turns of solved examples, in an order of its own."""
        order = self._rng.permutation(len(self.exemplars))[:exemplars]
        solved = [message for index in order for message in self._solved(self.exemplars[index])]
        return [*solved, *self.question_in(cell)]

    def follow_up(self, tokens: int) -> Message:
        """One more user turn, of `tokens` words."""
        return {"role": "user", "content": "".join(self._rng.choice(self._words, size=tokens))}

    @cached_property
    def exemplar_tokens(self) -> int:
        """By how many tokens the longest of the exemplars makes a prompt longer."""
        question = self.question(64, picture=True)
        return max(self.length([*self._solved(e), *question]) for e in self.exemplars) - self.length(question)

    def _solved(self, exemplar: Exemplar) -> list[Message]:
        return [
            user_turn(self._unique(exemplar.pixels), exemplar.question),
            {"role": "assistant", "content": exemplar.answer},
        ]

    def _unique(self, pixels: np.ndarray) -> np.ndarray:
        changed = pixels.copy()
        changed[0, :4] = self._rng.integers(256, size=(4, 3))
        return changed

    def _turn(self, pixels: np.ndarray | None, text: str) -> Message:
        """One user message: a picture (`[height, width, 3] uint8`) if there is one, then text."""
        if pixels is not None:
            return user_turn(pixels, text)
        return {"role": "user", "content": [{"type": "text", "text": text}] if self.takes_pictures else text}
