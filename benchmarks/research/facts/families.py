"""Families of facts about real things, and questions that make it hard to tell which of them is meant."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Final

from benchmarks.real.items import Item, Items, by_item
from benchmarks.real.sources import Packages
from benchmarks.real.tasks import REMEMBERED, TASKS

OF_TASKS: Final = ("airport", "calling_code", "element", "emoji")
CAPITAL: Final = (
    "What is the capital of {}?",
    "Which city is the seat of government of {}?",
    "Name the capital city of {}.",
    "The capital of {} is which city?",
)
CAPITAL_ASKED: Final = "I want to visit the parliament of {}. To which city do I travel?"


@dataclass(frozen=True)
class Family:
    """Things, each the one concept of its questions: the wordings in which their facts are stored, and another one."""

    name: str
    stored: dict[str, list[Item]]  # by thing, one for each wording
    asked: list[Item]  # in another wording


def families(packages: Packages, seed: int) -> list[Family]:
    """`REMEMBERED` things of each."""
    made = [_family(name, TASKS[name].items(packages, Random(seed))) for name in OF_TASKS]
    wordings = {"train": CAPITAL, "validation": (), "test": (CAPITAL_ASKED,)}
    closing = "Answer with the city's name only."
    return [*made, _family("capital", by_item(capitals(packages), wordings, REMEMBERED, Random(seed), closing))]


def capitals(packages: Packages) -> dict[str, str]:
    found = {country.name: country.capital for country in packages.countries}
    cities = list(found.values())
    return {
        name: city
        for name, city in found.items()
        if isinstance(city, str) and city.isalpha() and cities.count(city) == 1
    }


def _family(name: str, items: Items) -> Family:
    stored: dict[str, list[Item]] = {}
    for item in items["train"]:
        stored.setdefault(item.concepts[0], []).append(item)
    return Family(name, stored, items["test"])


def halves(things: Sequence[str], seed: int) -> tuple[set[str], set[str]]:
    """Those whose facts are stored, and the others."""
    drawn = sorted(things)
    Random(seed).shuffle(drawn)
    return set(drawn[: len(drawn) // 2]), set(drawn[len(drawn) // 2 :])


def typing_error(name: str, seed: int) -> str:
    """Two letters within a word change places."""
    at = Random(f"{name} {seed}").randrange(1, max(2, len(name) - 2))
    return name[:at] + name[at + 1 : at + 2] + name[at] + name[at + 2 :]


def is_inside(name: str, names: Sequence[str]) -> bool:
    """Whether all of its words stand in another name."""
    return any(set(name.split()) < set(other.split()) for other in names)


HARD: Final[dict[str, tuple[Callable[[str, Sequence[str]], bool], Callable[[str], str]]]] = {
    "another wording": (lambda name, _: True, CAPITAL_ASKED.format),
    "names of several words": (lambda name, _: " " in name, CAPITAL_ASKED.format),
    "names inside others": (is_inside, CAPITAL_ASKED.format),
    "lower case": (lambda name, _: True, lambda name: CAPITAL_ASKED.format(name).lower()),
    "German wording": (lambda name, _: True, "Ich reise ins Parlament von {}. In welche Stadt fahre ich?".format),
    "French wording": (lambda name, _: True, "Je visite le parlement de {}. Dans quelle ville vais-je ?".format),
    "typing error in the name": (
        lambda name, _: len(name) > 4,
        lambda name: CAPITAL_ASKED.format(typing_error(name, 0)),
    ),
    "two sentences before it": (
        lambda name, _: True,
        lambda name: f"My train is late and it rains. I have an hour to spend. {CAPITAL_ASKED.format(name)}",
    ),
    "another question about it": (lambda name, _: True, "How many people live in {}, roughly?".format),
}


def lockers(seed: int) -> Family:
    """Numbers that differ in one digit: what they are made of must not make them alike."""
    rng = Random(seed)
    numbers = [str(number) for number in sorted(rng.sample(range(1000, 1400), 128))]
    colours = [
        f"{rng.choice(('light', 'dark', 'pale'))} {rng.choice(('red', 'green', 'blue', 'grey'))}" for _ in numbers
    ]
    pairs = list(zip(numbers, colours, strict=True))
    stored = {n: [Item((n,), f"Which colour has locker {n}?", colour)] for n, colour in pairs}
    return Family("lockers", stored, [Item((n,), f"I stand before {n}: what is it painted in?", c) for n, c in pairs])


# Other questions about the things of a task; what is stored answers none of them.
ANOTHER: Final[dict[str, tuple[str, ...]]] = {
    "airport": (
        "How many flights leave {} each day?",
        "Is {} a large airport?",
        "Who designed the terminal at {}?",
        "How many runways has {}?",
        "Where can I eat at {}?",
        "What is the weather like at {}?",
    ),
    "calling_code": (
        "How many people live in {}, roughly?",
        "What language do they speak in {}?",
        "Which food is {} famous for?",
        "Who is the president of {}?",
        "When did {} become independent?",
        "Which currency is used in {}?",
    ),
    "emoji": (
        "How do I draw {}?",
        "Write a sentence with {}.",
        "When was {} added to Unicode?",
        "Which colour has {}?",
        "Is {} often used by teenagers?",
        "How do I type {} on a keyboard?",
    ),
}
