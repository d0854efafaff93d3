"""A piece's sentences become as many questions as are asked for, about words and endings that stand in it."""

from __future__ import annotations

from random import Random

import pytest

from selector.document.kinds import BLANK, clozes, continuations

PIECE = "\n".join(f"The {name} valve of the plant opens at {bar} bar." for name, bar in (("plover", 52), ("mill", 64)))


@pytest.mark.parametrize("count", [0, 1, 9])
def test_as_many_as_are_asked_for(count: int) -> None:
    for make in (clozes, continuations):
        made = make(PIECE, "valves", count, Random(0))
        assert len(made) == min(count, 2)
        assert len({each.text for each in made}) == len(made)


def test_exact_values_are_left_out_before_other_words() -> None:
    for each in clozes(PIECE, "valves", 2, Random(0)):
        assert each.exact
        assert each.missing in ("52", "64")
        assert each.answer == each.text.partition("blank: ")[2].replace(BLANK, each.missing)
        assert each.answer in PIECE
