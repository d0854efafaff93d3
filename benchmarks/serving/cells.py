"""The shapes of requests that are measured: how many at a time, how long, and with a picture or without."""

from __future__ import annotations

import re
from argparse import ArgumentTypeError
from dataclasses import dataclass

BLOCK_TOKENS = 16  # every block of a KV cache has a multiple of it
SPREAD = 8  # tokens by which prompts of a cell are longer or shorter than the nominal one
ONE_WAVE_TOKENS = 50_000  # prompts of so many tokens at a time make a block long enough by themselves


@dataclass(frozen=True)
class Cell:
    """Requests of one shape, `concurrency` at a time."""

    concurrency: int
    prompt: int  # tokens, about
    picture: bool = False  # each request has one of its own
    whole_blocks: bool = False  # prompts have exactly `prompt` tokens, and end a block of the KV cache

    @property
    def name(self) -> str:
        kind = "_picture" if self.picture else "_whole_blocks" if self.whole_blocks else ""
        return f"c{self.concurrency}_p{self.prompt}{kind}"

    @property
    def lengths(self) -> list[int]:
        """Of prompts, in tokens. A prompt that ends a block is another case for memory: one in sixteen is, not all."""
        if self.whole_blocks:
            return [self.prompt]
        around = range(self.prompt - SPREAD, self.prompt + SPREAD + 1)
        return [tokens for tokens in around if tokens % BLOCK_TOKENS]

    @property
    def requests(self) -> int:
        """Of a block: four of a single client, otherwise two waves, or one of long prompts."""
        if self.concurrency == 1:
            return 4
        return self.concurrency * (1 if self.concurrency * self.prompt > ONE_WAVE_TOKENS else 2)

    @property
    def turns(self) -> int:
        """Blocks of each method in a pass: a single client's are short."""
        return 2 if self.concurrency == 1 else 1


def cell(text: str) -> Cell:
    """Of "8x256"; of "1x256p", with pictures; of "1x256b", whole blocks. Raises ArgumentTypeError: of anything else."""
    found = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)([pb]?)", text)
    if found is None:
        raise ArgumentTypeError(
            f"expected CONCURRENCYxTOKENS, then p (pictures), b (whole blocks) or nothing: {text!r}"
        )
    concurrency, prompt, kind = int(found[1]), int(found[2]), found[3]
    if kind == "b" and prompt % BLOCK_TOKENS:
        raise ArgumentTypeError(f"{text}: whole blocks are a multiple of {BLOCK_TOKENS} tokens, found {prompt}")
    return Cell(concurrency, prompt, picture=kind == "p", whole_blocks=kind == "b")
