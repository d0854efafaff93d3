"""The hybrid's world: what memory is asked about is not what it was taught."""

from __future__ import annotations

from benchmarks.hybrid.proof import LEARNED, VALIDATED, questions
from benchmarks.hybrid.world import COLOUR_OF, COLOURS, GUILDS, THINGS, guilds, owners


def test_a_rule_is_asked_of_other_things_than_it_is_learned_from() -> None:
    things = list(THINGS)
    assert len(set(things)) == len(things) == 48
    learned = [row["prompt"] for row in guilds(things[: LEARNED + VALIDATED])]
    rules = [(prompt, answer) for task, prompt, answer in questions() if task == "guild"]
    assert len(rules) == len(things) - LEARNED - VALIDATED
    assert {prompt for prompt, _ in rules}.isdisjoint(learned)
    for prompt, answer in rules:
        (thing,) = (thing for thing in things if f" {thing}?" in prompt)
        assert COLOURS[GUILDS.index(answer)] == COLOUR_OF[thing]
    assert len({row["answer"] for row in owners(things)}) > 4
