"""What the data packages would hold, made up: as much as the real-data text stream needs, and nothing true in it."""

from itertools import product
from random import Random

from benchmarks.real.sources import LANGUAGES, Airport, Country, Element, Emoji, Packages, Word

CONSONANTS, VOWELS = "bdfgklmnprst", "aeiou"
SYLLABLES = [a + b for a, b in product(CONSONANTS, VOWELS)]
ZONES = ("Africa/A", "America/B", "Asia/C", "Europe/D")


def made_up_words(count: int) -> list[str]:
    """Different ones, of two to four syllables of two letters."""
    rng = Random("made up")
    words: dict[str, None] = {}
    while len(words) < count:
        words["".join(rng.choices(SYLLABLES, k=rng.randint(2, 4)))] = None
    return list(words)


class MadeUp(Packages):
    """As many of everything as the tests ask for."""

    def __init__(self, count: int = 900) -> None:
        names = made_up_words(3 * count)
        words, proper = names[:count], [name.capitalize() for name in names[count : 2 * count]]
        short = [name.capitalize()[:8] for name in proper]
        self.airports = tuple(
            Airport(f"{name[:3].upper()}{number}", name, f"{number % 97}", ZONES[number % 4])
            for number, name in enumerate(dict.fromkeys(short))
        )
        self.elements = tuple(Element(number, name, name[:2]) for number, name in enumerate(names[:118], start=1))
        self.countries = tuple(
            Country(name, capital, str(10 + number), (1 + number) * 10_000, f"{name}n")
            for number, (name, capital) in enumerate(zip(proper[::2], proper[1::2], strict=False))
        )
        self.emoji = tuple(
            Emoji(chr(0x1F300 + number), {"en": f"{name}d"} | {code: (name + code)[:8] for code in LANGUAGES})
            for number, name in enumerate(name for name in names[2 * count :] if len(name) <= 6)
        )
        self.words = tuple(
            Word(word, _phones(word)) for word in dict.fromkeys((*words, *(word[:2] + "n" for word in words)))
        )
        self.passages = tuple(" ".join(names[at : at + 30]) + "." for at in range(0, count, 30))
        self.valence = {word: 3.0 if number % 2 else -3.0 for number, word in enumerate(w.text for w in self.words)}


def _phones(word: str) -> tuple[str, ...]:
    """A phone for each letter, the last vowel but one stressed."""
    vowels = [at for at, letter in enumerate(word) if letter in VOWELS]
    stressed = vowels[-2:][0]
    return tuple(
        f"{letter.upper()}{int(at == stressed)}" if at in vowels else letter.upper() for at, letter in enumerate(word)
    )
