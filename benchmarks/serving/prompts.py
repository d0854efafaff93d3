"""Chat requests of an exact length, each with a prompt and a picture that no other request has."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from transformers import AutoConfig, AutoTokenizer

from benchmarks.chat import Message, user_turn


@dataclass(frozen=True)
class Exemplar:
    """One example of task data for a prompt: a picture, a question and the answer."""

    pixels: np.ndarray  # [48, 48, 3] uint8
    question: str
    answer: str


class PromptMaker:
    """Makes the messages of requests from the model's own tokenizer; the same seed makes the same requests."""

    def __init__(self, model: Path, exemplars: list[Exemplar], seed: int) -> None:
        self.exemplars = exemplars
        self._tokenizer = AutoTokenizer.from_pretrained(model)
        self._image_tokens: int = AutoConfig.from_pretrained(model).image_seq_length
        self._rng = np.random.default_rng(seed)
        pieces = self._tokenizer.get_vocab()
        # Words of one token each, with their leading space, so that a text's length in tokens is its number of words.
        self._words = sorted(p.replace("Ġ", " ") for p in pieces if re.fullmatch("Ġ[a-z]{2,}", p))
        assert len(self._words) >= 20, f"{model}: too few one-word tokens to make prompts of"

    def length(self, messages: list[Message]) -> int:
        """Tokens of a whole prompt as the model sees it: chat template, pictures, texts and generation prompt."""
        prompt = self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        parts = [part for message in messages for part in message["content"] if isinstance(part, dict)]
        pictures = [part for part in parts if part["type"] == "image_url"]
        ids = self._tokenizer(prompt, add_special_tokens=False).input_ids
        return len(ids) + len(pictures) * (self._image_tokens - 1)

    def question(self, tokens: int) -> list[Message]:
        """One user turn with a picture, a prompt of exactly `tokens` tokens."""
        picture = self._unique(self.exemplars[int(self._rng.integers(len(self.exemplars)))].pixels)
        words = self._rng.choice(self._words, size=tokens - self.length([user_turn(picture, "")]))
        messages = [user_turn(picture, "".join(words))]
        assert self.length(messages) == tokens, f"made a prompt of {self.length(messages)} tokens, not {tokens}"
        return messages

    def replayed(self, exemplars: int, tokens: int) -> list[Message]:
        """The same after `exemplars` chat turns of solved examples, in an order of its own."""
        order = self._rng.permutation(len(self.exemplars))[:exemplars]
        solved = [message for index in order for message in self._solved(self.exemplars[index])]
        return [*solved, *self.question(tokens)]

    def follow_up(self, tokens: int) -> Message:
        """One more user turn, of `tokens` words."""
        return {"role": "user", "content": "".join(self._rng.choice(self._words, size=tokens))}

    def exemplar_tokens(self) -> int:
        """By how many tokens the longest of the exemplars makes a prompt longer."""
        question = self.question(64)
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
