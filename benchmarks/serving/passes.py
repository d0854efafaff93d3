"""Passes over all cells until the time is spent: which method is asked next, and what is kept."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from benchmarks.serving.cells import Cell
from benchmarks.serving.methods import Method

WARM_UP = -1  # the number of the pass that is dropped
WARM_TOKENS = 8
FAILURES = 3  # blocks, one after the other, after which a method is no longer asked
FIRST_BLOCK_SECONDS = 2.0  # what a block is taken to need before one of its kind was seen
SLACK = 1.3  # a block may take so many times the last one

Block = dict[str, Any]  # a line of the file of blocks: see `Passes._block`


class Ask(Protocol):
    """Sends `count` requests of a method in a cell, for `tokens` tokens each: seconds, timings, what failed."""

    def __call__(
        self, cell: Cell, method: Method, count: int, tokens: int
    ) -> Awaitable[tuple[float, Sequence[Any], list[str]]]: ...


@dataclass
class Passes:
    """One measurement."""

    ask: Ask
    keep: Callable[[Block], None]  # called at once for each block
    plan: Mapping[Cell, Sequence[Method]]
    output_tokens: int
    deadline: float  # of `clock`
    clock: Callable[[], float] = time.monotonic
    _took: dict[tuple[Cell, str], float] = field(default_factory=dict)  # seconds of the last block
    _failures: dict[str, int] = field(default_factory=lambda: defaultdict(int))

    async def run(self, most: int | None) -> int:
        """Go over all cells, at most `most` times, until no block fits the time left: whole passes.

        The first one warms each cell up.
        """
        whole = 0
        for number in itertools.count() if most is None else range(most):
            planned = ((cell, *block) for cell in self.plan for block in self._blocks(cell, number))
            asked = [await self._block(cell, method, each) for cell, method, each in planned]
            if not any(asked):
                break
            whole += all(asked)
        return whole

    async def _block(self, cell: Cell, method: Method, number: int) -> bool:
        """Ask and keep; False if the time left is too short."""
        left = self.deadline - self.clock()
        if left < SLACK * self._took.get((cell, method.name), FIRST_BLOCK_SECONDS):
            return False
        warming = number == WARM_UP
        tokens = min(WARM_TOKENS, self.output_tokens) if warming else self.output_tokens
        count = cell.concurrency if warming else cell.requests
        try:
            seconds, timings, failed = await asyncio.wait_for(self.ask(cell, method, count, tokens), left)
        except TimeoutError:
            return False
        self._failures[method.name] = self._failures[method.name] + 1 if failed else 0
        if not failed and not warming:
            self._took[cell, method.name] = seconds
        block = {"cell": cell.name, "method": method.name, "pass": number, "seconds": round(seconds, 5)}
        self.keep(block | {"requests": list(timings)} | ({"failed": failed} if failed else {}))
        return True

    def _blocks(self, cell: Cell, number: int) -> Iterator[tuple[Method, int]]:
        """The methods of a cell in a pass, without those that keep failing, and the number that each block has."""
        turns = [(rotated(self.plan[cell], number * cell.turns + turn), number) for turn in range(cell.turns)]
        for methods, each in [(self.plan[cell], WARM_UP), *turns] if number == 0 else turns:
            for method in methods:
                if self._failures[method.name] < FAILURES:
                    yield method, each


def rotated(methods: Sequence[Method], by: int) -> list[Method]:
    """Each pass begins with another one: whoever follows the same neighbour always would share its noise."""
    first = by % len(methods) if methods else 0
    return [*methods[first:], *methods[:first]]
