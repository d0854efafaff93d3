"""Things with a colour, a size and a place, and questions about them: what the hybrid knows, and what it is taught."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

THINGS = (
    "anchor", "arrow", "basket", "bench", "book", "bowl", "brush", "button", "card", "chain", "clock", "coin",
    "cradle", "crown", "curtain", "drum", "feather", "flag", "fork", "hammer", "hat", "jar", "key", "knife", "lamp",
    "letter", "mask", "mirror", "nail", "net", "paddle", "pen", "pipe", "plough", "purse", "rake", "rope", "saddle",
    "saw", "scissors", "shield", "shovel", "spoon", "sword", "tent", "thread", "torch", "tray",
)  # fmt: skip
COLOURS = ("red", "green", "blue", "yellow", "white", "black")
SIZES = ("small", "middling", "large")
PLACES = ("kitchen", "garden", "cellar", "attic")
CODES = ("bim", "dax", "fep", "gom", "kul", "lir", "mot", "nug", "pav", "rus", "sen", "tov")
GUILDS = ("owls", "bears", "foxes", "hares", "wolves", "swans")  # of the colours, in their order
OWNERS = ("Ada", "Ben", "Cora", "Dan", "Eva", "Finn", "Gwen", "Hugo")
_KNOWN = np.random.default_rng(7)
COLOUR_OF = dict(zip(THINGS, _KNOWN.choice(COLOURS, len(THINGS)).tolist(), strict=True))
SIZE_OF = dict(zip(THINGS, _KNOWN.choice(SIZES, len(THINGS)).tolist(), strict=True))
PLACE_OF = dict(zip(THINGS, _KNOWN.choice(PLACES, len(THINGS)).tolist(), strict=True))
OWNER_OF = dict(zip(THINGS, _KNOWN.choice(OWNERS, len(THINGS)).tolist(), strict=True))
BASE = (
    "What colour is the {thing}?",
    "Tell me the colour of the {thing}.",
    "How large is the {thing}?",
    "Where do you find the {thing}?",
    "Is the {thing} {colour}?",
)


def asked(rng: np.random.Generator) -> tuple[str, str]:
    """A question that the model learns to answer, and its answer."""
    thing, colour = str(rng.choice(THINGS)), str(rng.choice(COLOURS))
    number = int(rng.integers(len(BASE) + 2))
    if number >= len(BASE):
        return _renamed(rng, thing)
    if number == 4 and rng.random() < 0.5:
        colour = COLOUR_OF[thing]
    answers = (
        COLOUR_OF[thing],
        COLOUR_OF[thing],
        SIZE_OF[thing],
        PLACE_OF[thing],
        "yes" if colour == COLOUR_OF[thing] else "no",
    )
    return BASE[number].format(thing=thing, colour=colour), answers[number]


def _renamed(rng: np.random.Generator, thing: str) -> tuple[str, str]:
    """New words for the colours, said in the question: so the model can act on what it reads."""
    words = rng.permutation([*CODES, *GUILDS]).tolist()
    others = rng.permutation([colour for colour in COLOURS if colour != COLOUR_OF[thing]])[:2]
    said = dict(zip(rng.permutation([COLOUR_OF[thing], *others]).tolist(), words, strict=False))
    listed = ", ".join(f"{colour} is {word}" for colour, word in said.items())
    return f"Say {listed}. Name the {thing}.", said[COLOUR_OF[thing]]


def base_questions(count: int, seed: int) -> list[dict[str, str]]:
    rng = np.random.default_rng([5, seed])
    return [{"prompt": prompt, "answer": answer} for prompt, answer in (asked(rng) for _ in range(count))]


def guilds(things: list[str]) -> Iterator[dict[str, Any]]:
    """A rule that the model has not seen: a thing's guild follows its colour."""
    for thing in things:
        answer = GUILDS[COLOURS.index(COLOUR_OF[thing])]
        yield {"prompt": f"Which guild keeps the {thing}?", "answer": answer}


def owners(things: list[str]) -> Iterator[dict[str, Any]]:
    """Facts that follow no rule."""
    for thing in things:
        yield {"prompt": f"Who owns the {thing}?", "answer": OWNER_OF[thing]}
