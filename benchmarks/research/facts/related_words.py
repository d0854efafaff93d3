"""English words that ask the same, by WordNet 3.0, for `inducekv_vllm.facts`.

python -m benchmarks.research.facts.related_words /usr/share/wordnet

This writes inducekv_vllm/facts/languages/related_words.json. The folder has the files of Debian's package
`wordnet-base` [wndb(5WN), cntlist(5WN)]. Two words are related if they have a sense in common or are derived from each
other (found, founder, foundation), if an adjective is about the noun or its attribute (paternal, father; tall, height),
or like the other. Of a word, the senses count that it has had in at least every fifth place of the texts that WordNet's
authors tagged. Words that were never tagged are left out, unless the other is usual.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from inducekv_vllm.facts.language import ENGLISH, RELATED_WORDS, languages

USUAL: Final = 0.2  # of a word's tags: a sense that counts
FILES: Final = {"noun": "n", "verb": "v", "adj": "a", "adv": "r"}  # by their letters in WordNet's pointers
KINDS: Final = {"1": "n", "2": "v", "3": "a", "4": "r", "5": "a"}  # by the digits of sense keys; 5 is a satellite
DERIVED, ALIKE, ABOUT, ATTRIBUTE = "+", "&", "\\", "="
PERSON: Final = 18  # the number of the file of nouns for people
SenseKey = tuple[str, str]  # a letter and an offset


@dataclass(frozen=True)
class Sense:
    words: tuple[str, ...]
    pointers: tuple[
        tuple[str, SenseKey, int, int], ...
    ]  # symbol, to which sense, from which word and to which (0: all)
    file: int


class Lexicon(NamedTuple):
    senses: Mapping[SenseKey, Sense]
    usual: Mapping[str, frozenset[SenseKey]]  # senses of a word that count, if it is one of letters alone
    tags: Mapping[str, int]


def read_lexicon(folder: Path) -> Lexicon:
    tagged = dict(_tagged(folder / "cntlist.rev"))
    senses: dict[SenseKey, Sense] = {}
    ranked: dict[str, list[tuple[SenseKey, int]]] = defaultdict(list)  # with how often each was tagged
    for name, letter in FILES.items():
        senses.update(_senses(folder / f"data.{name}", letter))
        for word, offsets in _indexed(folder / f"index.{name}"):
            ranked[word] += [
                ((letter, offset), tagged.get((word, letter, number), 0)) for number, offset in enumerate(offsets, 1)
            ]
    tags = {word: sum(count for _, count in of_word) for word, of_word in ranked.items()}
    usual = {
        word: frozenset(
            key for key, count in of_word if (count >= USUAL * tags[word] if tags[word] else key == of_word[0][0])
        )
        for word, of_word in ranked.items()
        if word.isalpha()
    }
    return Lexicon(senses, usual, tags)


def _tagged(path: Path) -> Iterator[tuple[tuple[str, str, int], int]]:
    for line in _lines(path):
        key, number, count = line.split()
        word, rest = key.split("%")
        yield (word, KINDS[rest[0]], int(number)), int(count)


def _indexed(path: Path) -> Iterator[tuple[str, list[str]]]:
    """Each word with the offsets of its senses, those that are tagged most often first."""
    for line in _lines(path):
        word, _, num_senses, num_symbols, *rest = line.split()
        yield word, rest[int(num_symbols) + 2 :][: int(num_senses)]


def _senses(path: Path, letter: str) -> Iterator[tuple[SenseKey, Sense]]:
    for line in _lines(path):
        offset, file, _, num_words, *rest = line.split("|")[0].split()
        count = int(num_words, 16)
        words = tuple(word.split("(")[0] for word in rest[: 2 * count : 2])
        after = rest[2 * count + 1 :]
        pointers = tuple(
            (
                after[at],
                (after[at + 2].replace("s", "a"), after[at + 1]),
                int(after[at + 3][:2], 16),
                int(after[at + 3][2:], 16),
            )
            for at in range(0, 4 * int(rest[2 * count]), 4)
        )
        yield (letter, offset), Sense(words, pointers, int(file))


def _lines(path: Path) -> Iterator[str]:
    """Without the licence, whose lines begin with a blank."""
    with path.open(encoding="utf-8") as lines:
        yield from (line for line in lines if not line.startswith(" "))


def related_pairs(lexicon: Lexicon) -> Iterator[tuple[str, str]]:
    by_sense: dict[SenseKey, list[str]] = defaultdict(list)
    for word, keys in lexicon.usual.items():
        for key in keys:
            if word in lexicon.senses[key].words:  # not written with a capital letter
                by_sense[key].append(word)
    for key, words in by_sense.items():
        sense = lexicon.senses[key]
        yield from ((first, second) for first in words for second in words if first < second)
        for symbol, other, source, target in sense.pointers:
            if symbol in (ALIKE, ABOUT, ATTRIBUTE):
                yield from ((first, second) for first in words for second in by_sense.get(other, ()))
            elif symbol == DERIVED and (word := sense.words[source - 1]) in words:
                derived = lexicon.senses[other].words[target - 1].lower()  # in whatever sense it is usual
                yield from ((word, second) for second in {derived, *by_sense.get(other, ())} & lexicon.usual.keys())
                yield from ((first, second) for first in words for second in by_sense.get(other, ()))


def related_words(lexicon: Lexicon) -> dict[str, object]:
    """`related`: stems with those that come after them in the alphabet; `people`: stems of words for people."""
    language = languages()[ENGLISH]
    related: dict[str, set[str]] = defaultdict(set)
    for pair in related_pairs(lexicon):
        first, second = sorted(map(language.stem, pair))
        if first != second and max(map(lexicon.tags.__getitem__, pair)) > 0:
            related[first].add(second)
    return {
        "related": {stem: " ".join(sorted(related[stem])) for stem in sorted(related)},
        "people": " ".join(sorted(set(map(language.stem, people(lexicon))))),
    }


def people(lexicon: Lexicon) -> Iterable[str]:
    """Words that were tagged, and most often as a noun for a person."""
    for word, keys in lexicon.usual.items():
        if lexicon.tags[word] and all(lexicon.senses[key].file == PERSON for key in keys):
            yield word


def written(words: Mapping[str, object]) -> str:
    return json.dumps(words, ensure_ascii=False, indent=0, separators=(",", ":")) + "\n"


def main(arguments: list[str]) -> int:
    if len(arguments) != 1 or not (folder := Path(arguments[0])).is_dir():
        print(__doc__, file=sys.stderr)
        return 2
    RELATED_WORDS.write_text(written(related_words(read_lexicon(folder))), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
