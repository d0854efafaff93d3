"""Passes over the cells: they go by turns, and end with the budget or the count."""

import asyncio
from collections.abc import Sequence
from typing import Any

from benchmarks.serving.cells import Cell
from benchmarks.serving.methods import Method
from benchmarks.serving.passes import WARM_UP, Block, Passes, rotated

ONE, EIGHT = Cell(1, 256), Cell(8, 256)
METHODS = [Method(name, "plugin", name, lambda cell: []) for name in "abc"]


class World:
    """A clock that only requests move, a second each."""

    def __init__(self) -> None:
        self.now = 0.0
        self.kept: list[Block] = []
        self.asked: list[tuple[str, str, int, int]] = []

    async def ask(self, cell: Cell, method: Method, count: int, tokens: int) -> tuple[float, Sequence[Any], list[str]]:
        self.now += 1.0
        self.asked.append((cell.name, method.name, count, tokens))
        return 1.0, [(0.1, 0.01, 256, tokens)] * count, []

    def passes(self, deadline: float = 1e9) -> Passes:
        plan = {ONE: METHODS, EIGHT: METHODS}
        return Passes(self.ask, self.kept.append, plan, output_tokens=32, deadline=deadline, clock=lambda: self.now)

    def measured(self, number: int) -> list[tuple[str, str]]:
        return [(block["cell"], block["method"]) for block in self.kept if block["pass"] == number]


def test_every_pass_goes_over_all_cells_and_begins_with_another_method() -> None:
    assert ["".join(method.name for method in rotated(METHODS, n)) for n in range(4)] == ["abc", "bca", "cab", "abc"]
    world = World()
    assert asyncio.run(world.passes().run(2)) == 2
    cells = [*[ONE.name] * 6, *[EIGHT.name] * 3]
    assert world.measured(WARM_UP) == [(cell.name, method.name) for cell in (ONE, EIGHT) for method in METHODS]
    assert world.measured(0) == list(zip(cells, "abcbcaabc", strict=True))
    assert world.measured(1) == list(zip(cells, "cababcbca", strict=True))
    assert [(count, tokens) for *_, count, tokens in world.asked[:15:3]] == [(1, 8), (4, 32), (4, 32), (8, 8), (16, 32)]


def test_passes_go_on_until_no_block_fits_the_time_left() -> None:
    world = World()
    whole = asyncio.run(world.passes(deadline=40.0).run(None))
    assert whole == 3  # 6 blocks warm up, 9 make a pass
    assert 40 - 2 <= world.now <= 40
    assert len(world.kept) == world.now
