"""The hybrid's world: every answer is right, and what memory is asked about is not what it was taught."""

from __future__ import annotations

import re

import numpy as np

from benchmarks.hybrid.proof import LEARNED, VALIDATED, questions
from benchmarks.hybrid.world import COLOUR_OF, COLOURS, GUILDS, PLACE_OF, SIZE_OF, THINGS, asked, guilds, owners


def expected(question: str) -> str:
    """From the text of a question alone."""
    thing = next(thing for thing in THINGS if re.search(rf"\b{thing}\b", question))
    if said := dict(re.findall(r"(\w+) is (\w+)[,.]", question)):
        return str(said[COLOUR_OF[thing]])
    if is_of := re.fullmatch(r"Is the \w+ (\w+)\?", question):
        return "yes" if is_of[1] == COLOUR_OF[thing] else "no"
    known = {"colour": COLOUR_OF, "large": SIZE_OF, "find": PLACE_OF}
    return next(of[thing] for word, of in known.items() if word in question)


def test_answers_are_right() -> None:
    rng = np.random.default_rng(0)
    for _ in range(300):
        question, answer = asked(rng)
        assert answer == expected(question)


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
