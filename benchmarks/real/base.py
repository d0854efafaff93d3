"""Base questions of the real-data text stream: what SmolLM2-135M-Instruct answers well before it has learned anything.

A family is a kind of question over many concepts. Half of the concepts choose the families, the other half are what is
measured, so that the accuracy reported is not that of a lucky choice: `CHOSEN` are those with at least `ENOUGH` right
of the first half, and test questions come from the second half alone. This prints both halves of every family:

    python -m benchmarks.real.base [--model DIR] [--questions N] [--out JSON]
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product, zip_longest
from pathlib import Path
from random import Random
from typing import Any, Final

from benchmarks.chat import same_answer
from benchmarks.real.items import BASE, SPLITS, Item, Items, Split, examples_of, fraction_of
from benchmarks.real.model import model_folder
from benchmarks.real.sources import ENGLISH, Packages
from benchmarks.real.tasks import NUMBER
from benchmarks.record import keep, parser_of
from inducekv_vllm.errors import InduceKVError
from selector.backbone.bundled_model import BundledModel
from selector.backbone.model import Backbone
from selector.backbone.scoring import Scorer

ENOUGH: Final = 0.8  # right of the first half
SHARE: Final = 1 / 3  # of a paragraph's words that stand in the question
SHOTS: Final = 4  # worked examples before a question of the families that have them
MAX_TOKENS: Final = 12  # of an answer, as in the stream benchmark
Facts = Iterator[tuple[str, str, str]]  # concept, question, answer


@dataclass(frozen=True)
class Family:
    """A kind of question; `shown`: with worked examples as earlier turns of the conversation, in one word each."""

    facts: Callable[[Packages], Facts]
    shown: bool


def _symbol(packages: Packages) -> Facts:
    for element in packages.elements:
        answer = f"The chemical symbol of {element.name} is {element.symbol}"
        yield element.name, f"What is the chemical symbol of {element.name}?", answer


def _plural(packages: Packages) -> Facts:
    for word in nouns(packages):
        yield word, f"What is the plural of {word}?", f"The plural of {word} is {word}s"


def _sum(packages: Packages) -> Facts:
    for a, b in product(range(1, 10), repeat=2):
        yield f"{a} + {b}", f"What is {a} + {b}? {NUMBER}", f"{a} + {b} = {a + b}"


def _capital(packages: Packages) -> Facts:
    for country in packages.countries:
        if country.name.isalpha() and country.capital.isalpha() and country.area > 200_000:
            yield country.name, f"Capital of {country.name}?", country.capital


def _people(packages: Packages) -> Facts:
    for country in packages.countries:
        if country.name.isalpha() and country.demonym.isalpha() and country.area > 50_000:
            yield country.name, country.name, country.demonym


def _repeat(packages: Packages) -> Facts:
    for word in nouns(packages):
        yield word, f"Say the word {word}.", word


def _last(packages: Packages) -> Facts:
    words = nouns(packages)
    for number, word in enumerate(words):
        yield word, f"Last word of: {words[(7 * number + 3) % len(words)]}, {word}", word


def _ending(ending: str, packages: Packages) -> Facts:
    """Words of which the lexicon has the one with this ending too."""
    for word in sorted(packages.valence):
        if re.fullmatch("[a-z]{4,8}", word) and word + ending in packages.valence:
            yield word, word, word + ending


FAMILIES: Final[dict[str, Family]] = {
    "plural": Family(_plural, shown=False),
    "symbol": Family(_symbol, shown=False),
    "sum": Family(_sum, shown=False),
    "capital": Family(_capital, shown=True),
    "people": Family(_people, shown=True),
    "repeat": Family(_repeat, shown=True),
    "last": Family(_last, shown=True),
    "past": Family(partial(_ending, "ed"), shown=True),
    "participle": Family(partial(_ending, "ing"), shown=True),
    "adverb": Family(partial(_ending, "ly"), shown=True),
    "third_person": Family(partial(_ending, "s"), shown=True),
}
CHOSEN: Final = ("plural", "repeat", "last")  # by the first half: benchmarks/results/real_text_base.json


def nouns(packages: Packages) -> list[str]:
    """English names of emoji of one word of 3 to 8 letters whose plural ends in a mere s."""
    names = {emoji.names[ENGLISH] for emoji in packages.emoji}
    return sorted(name for name in names if re.fullmatch("[a-z]{2,7}[abdegklmnprtw]", name))


def halves(name: str, packages: Packages) -> tuple[list[Item], list[Item]]:
    """A family's items on whose accuracy it is chosen, and those that are measured; no concept is in both.

    Worked examples are the family's first facts of the first half, and are asked about in neither.
    """
    family = FAMILIES[name]
    parts: tuple[list[Item], list[Item]] = [], []
    for concept, question, answer in family.facts(packages):
        parts[fraction_of(f"base {concept}") >= 0.5].append(Item((concept,), question, answer))
    if not family.shown:
        return parts
    first = Random(name).sample(parts[0], len(parts[0]))
    turns = tuple((item.question, item.answer) for item in first[:SHOTS])
    return [replace(item, turns=turns) for item in first[SHOTS:]], [replace(item, turns=turns) for item in parts[1]]


def base_items(packages: Packages, sizes: dict[Split, int], rng: Random) -> Items:
    """The chosen families in equal shares: validation of the first half of each, test of the second.

    Gates are fitted to the training questions, and answers to them do not count. They are of the chosen families, of
    the others, and beginnings of plain text, in turn while there are any: a gate must see more than what is measured.
    """
    pools: dict[str, tuple[list[Item], list[Item]]] = {}
    for name in CHOSEN:
        first, second = halves(name, packages)
        pools[name] = rng.sample(first, len(first))[::-1], rng.sample(second, len(second))[::-1]
    chosen = {split: in_turn([pools[name][split == "test"] for name in CHOSEN]) for split in SPLITS}
    others = in_turn([rng.sample(f, len(f)) for f in (halves(n, packages)[0] for n in FAMILIES if n not in CHOSEN)])
    train = in_turn([chosen["train"], others, plain_text(packages)])[: sizes["train"]]
    validation = [item for item in chosen["validation"] if item not in train][: sizes["validation"]]
    return {"train": train, "validation": validation, "test": chosen["test"][: sizes["test"]]}


def plain_text(packages: Packages) -> list[Item]:
    """Beginnings of paragraphs with their rest as the answer: of every other one, the others are shown to no gate."""
    items = []
    for passage in packages.passages[::2]:
        words = passage.split()
        at = max(1, int(SHARE * len(words)))
        items.append(Item((passage,), " ".join(words[:at]), " ".join(words[at:])))
    return items


def in_turn(pools: Sequence[Sequence[Item]]) -> list[Item]:
    """One of each pool after the other, while it lasts."""
    return [item for turn in zip_longest(*pools) for item in turn if item is not None]


def accuracy(model: BundledModel, items: Sequence[Item]) -> float:
    answers = model.answers(examples_of(items, BASE, "first"), MAX_TOKENS)
    return sum(same_answer(text, item.answer) for text, item in zip(answers, items, strict=True)) / len(items)


def measure(model: Path, packages: Packages, questions: int) -> dict[str, Any]:
    """Accuracy of the untouched model on both halves of every family, at most so many questions of each."""
    untouched = BundledModel(Scorer(Backbone.load(model)), None)
    families = {}
    for name in FAMILIES:
        rng = Random(name)
        parts = [rng.sample(half, min(len(half), questions)) for half in halves(name, packages)]
        first, second = (round(accuracy(untouched, part), 3) for part in parts)
        row = {"first_half": first, "second_half": second, "questions": [len(part) for part in parts]}
        families[name] = row | {"chosen": first >= ENOUGH}
        print(f"{name:14} {first:.3f} {second:.3f}{'  chosen' if first >= ENOUGH else ''}", file=sys.stderr, flush=True)
    return families


def main(arguments: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--model", type=Path, help="(default: that of benchmarks.real.model)")
    parser.add_argument("--questions", type=int, default=64, help="of each half of each family (default %(default)s)")
    options = parser.parse_args(arguments)
    try:
        families = measure(options.model or model_folder(), Packages(), options.questions)
    except InduceKVError as error:
        print(f"benchmarks.real.base: error: {error}", file=sys.stderr)
        return 2
    keep({"benchmark": "real-text base", "enough": ENOUGH, "families": families}, options.output)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
