"""Passes over the cells: they end with the budget or the count, go by turns, and drop a method that keeps failing."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from benchmarks.serving.cells import Cell
from benchmarks.serving.methods import Method
from benchmarks.serving.passes import FAILURES, WARM_UP, Block, Passes, rotated

ONE, EIGHT = Cell(1, 256), Cell(8, 256)
METHODS = [Method(name, "plugin", name, lambda cell: []) for name in "abc"]


class World:
    """A clock that only requests move, and servers that answer after so many seconds."""

    def __init__(self, seconds: float = 1.0, failing: Sequence[str] = ()) -> None:
        self.now, self.seconds, self.failing = 0.0, seconds, failing
        self.kept: list[Block] = []
        self.asked: list[tuple[str, str, int, int]] = []

    async def ask(self, cell: Cell, method: Method, count: int, tokens: int) -> tuple[float, Sequence[Any], list[str]]:
        self.now += self.seconds
        self.asked.append((cell.name, method.name, count, tokens))
        failed = ["HTTP 500"] if method.name in self.failing else []
        return self.seconds, [] if failed else [(0.1, 0.01, 256, tokens)] * count, failed

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


def test_a_long_cell_that_no_longer_fits_does_not_end_the_short_ones() -> None:
    world = World()
    passes = world.passes(deadline=40.0)
    passes._took = {(EIGHT, method.name): 100.0 for method in METHODS}
    assert asyncio.run(passes.run(None)) == 0
    assert Counter(block["cell"] for block in world.kept)[ONE.name] > 30


@pytest.mark.parametrize("failing", ["b", "abc"])
def test_a_method_that_keeps_failing_is_dropped(failing: str) -> None:
    world = World(failing=failing)
    asyncio.run(world.passes(deadline=500.0).run(4))
    blocks = Counter(block["method"] for block in world.kept)
    assert {blocks[name] for name in failing} == {FAILURES}
    assert all(blocks[name] == 2 + 4 * 3 for name in "abc" if name not in failing)
    assert all(block["failed"] == ["HTTP 500"] for block in world.kept if block["method"] in failing)


def test_a_method_that_fails_now_and_then_stays() -> None:
    world, passes = World(), World().passes()
    times = itertools.count()

    async def ask(cell: Cell, method: Method, count: int, tokens: int) -> tuple[float, Sequence[Any], list[str]]:
        world.failing = "b" if method.name == "b" and next(times) % 2 else ""
        return await world.ask(cell, method, count, tokens)

    passes.ask, passes.keep = ask, world.kept.append
    assert asyncio.run(passes.run(4)) == 4
    assert Counter(block["method"] for block in world.kept)["b"] == 2 + 4 * 3


def test_a_server_that_hangs_does_not_keep_the_run_beyond_its_budget() -> None:
    async def hang(*_: Any) -> Any:
        await asyncio.sleep(60)

    kept: list[Block] = []
    times = itertools.chain([-3.0], itertools.repeat(-0.1))
    passes = Passes(hang, kept.append, {ONE: METHODS[:1]}, 2, deadline=0.0, clock=times.__next__)
    assert asyncio.run(asyncio.wait_for(passes.run(None), 20)) == 0
    assert kept == []
