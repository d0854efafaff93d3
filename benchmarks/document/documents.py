"""The documents, and questions for their values: nobody can know them who has not read the document.

Each question has the values of which one must stand in a right answer, in the words that an answer may give them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from types import MappingProxyType
from typing import Final

from selector.data.document import Document

PUMP: Final = Path(__file__).parents[2] / "docs/examples/pump/pump.md"
PUMP_QUESTIONS: Final = Path(__file__).parent / "pump.jsonl"
QUESTIONS: Final = 30
INSTRUMENTS: Final = 60
MACHINES: Final = 28
SYLLABLES: Final = ("ka", "ro", "ve", "lin", "tor", "mi", "sel", "dra", "qu", "fen", "osk", "bel", "zan", "hu", "pri")
KINDS: Final = ("pump", "press", "mill", "dryer", "mixer", "crane")
COLOURS: Final = ("red", "blue", "white", "green", "yellow", "orange", "violet")


@dataclass(frozen=True)
class Asked:
    """A question, and the values of which a right answer has one."""

    question: str
    values: tuple[str, ...]


def pump() -> tuple[Document, Sequence[Asked]]:
    """The manual of the tutorial; the questions were written by hand before anything was measured."""
    rows = [json.loads(line) for line in PUMP_QUESTIONS.read_text(encoding="utf-8").splitlines()]
    return Document("pump", PUMP.read_text(encoding="utf-8")), [
        Asked(row["question"], tuple(row["values"])) for row in rows
    ]


def register() -> tuple[Document, Sequence[Asked]]:
    """Instruments of an observatory that does not exist."""
    rng = Random("document")
    names = _names(rng, 2 * INSTRUMENTS)
    lines, asked = [], []
    for name, room in zip(rng.sample(names, INSTRUMENTS), rng.sample(range(100, 999), INSTRUMENTS), strict=True):
        keeper, year = rng.choice(names), rng.randrange(1901, 1999)
        measured = rng.choice(("light", "wind", "heat", "salt", "sound"))
        lines.append(
            f"The instrument {name} stands in room {room} and was built in {year}. "
            f"It measures {measured}, and its keeper is Mr {keeper}."
        )
        asked.append(
            rng.choice(
                (
                    Asked(f"In which room does the instrument {name} stand?", (str(room),)),
                    Asked(f"In which year was the instrument {name} built?", (str(year),)),
                    Asked(f"Who is the keeper of the instrument {name}?", (keeper,)),
                )
            )
        )
    return Document("Register of the observatory", "\n\n".join(lines)), rng.sample(asked, QUESTIONS)


def handbook() -> tuple[Document, Sequence[Asked]]:
    """Machines of a plant that does not exist, a page each: more than 6,000 tokens."""
    rng = Random("handbook")
    pages, asked = [], []
    for name in _names(rng, 2 * MACHINES)[:MACHINES]:
        page, questions = _machine(f"the {name} {rng.choice(KINDS)}", rng)
        pages.append(page)
        asked.append(rng.sample(questions, 2))
    chosen = [each for of_page in asked for each in of_page]
    return Document("Handbook of the plant", "\n\n".join(pages)), rng.sample(chosen, QUESTIONS)


def _machine(name: str, rng: Random) -> tuple[str, list[Asked]]:
    """Its page, and what can be asked about it."""
    hall, weight, bar = rng.randrange(1, 40), rng.randrange(200, 3000), rng.randrange(3, 60)
    minutes, days, crowns = rng.randrange(2, 50), rng.randrange(10, 300), rng.randrange(12, 900)
    part = f"{rng.choice('ABCDEFGHKLMNPRST')}{rng.choice('ABCDEFGHKLMNPRST')}-{rng.randrange(100, 999)}"
    ready, fault = rng.sample(COLOURS, 2)
    oil, foreman = (each for each in _names(rng, 2))
    page = (
        f"# {name[0].upper()}{name[1:]}\n\n"
        f"You find {name} in hall {hall}. It weighs {weight} kilograms and was paid for by the town. Only people who "
        f"have read this page may use it, and the foreman, Mr {foreman}, keeps the list of them.\n\n"
        f"Before you start {name}, look whether its belt is dry and whether somebody stands behind it. Press the upper "
        f"button, wait for {minutes} minutes, and watch the lamp: it turns {ready} when the machine is ready. If it "
        f"turns {fault} instead, the brake is worn, and you must not go on. The machine works at {bar} bar; at more "
        f"than that it stops by itself.\n\n"
        f"Change the filter of {name} every {days} days. The filter has the part number {part} and costs {crowns} "
        f"crowns. Grease the shaft with {oil} oil, and never with any other, because the seals swell. Write down what "
        f"you have done in the book that lies beside the door, with the date and your name."
    )
    return page, [
        Asked(f"In which hall is {name}?", (str(hall),)),
        Asked(f"How many kilograms does {name} weigh?", (str(weight),)),
        Asked(f"Who is the foreman of {name}?", (foreman,)),
        Asked(f"How many minutes do I wait after I have pressed the upper button of {name}?", (str(minutes),)),
        Asked(f"Which colour does the lamp of {name} have when it is ready?", (ready,)),
        Asked(f"Which colour does the lamp of {name} have when its brake is worn?", (fault,)),
        Asked(f"At how many bar does {name} work?", (str(bar),)),
        Asked(f"After how many days do I change the filter of {name}?", (str(days),)),
        Asked(f"What is the part number of the filter of {name}?", (part,)),
        Asked(f"How many crowns does the filter of {name} cost?", (str(crowns),)),
        Asked(f"With which oil do I grease the shaft of {name}?", (oil,)),
    ]


def _names(rng: Random, count: int) -> list[str]:
    names = sorted({"".join(rng.sample(SYLLABLES, 3)).capitalize() for _ in range(count)})
    return rng.sample(names, len(names))


DOCUMENTS: Final[Mapping[str, Callable[[], tuple[Document, Sequence[Asked]]]]] = MappingProxyType(
    {"pump": pump, "register": register, "handbook": handbook}
)
