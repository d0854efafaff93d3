"""Tasks made of other people's requests, and what must stay out of them.

A task is some intents of one domain. The domain's other intents are its siblings, the nearest misses. A set without
domains is one domain, or, where its intents have nothing in common, as many as it has intents.
"""

from __future__ import annotations

import gzip
import hashlib
import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, Final, Literal

from inducekv_vllm.errors import ConfigError

Half = Literal["choose", "report"]
SIBLINGS, DOMAINS, OUT_OF_SCOPE = "sibling intents", "other domains", "out of scope"
EVERYDAY, GOOGLE, LANGUAGES = "everyday", "Google", "other languages"
KINDS: Final = (SIBLINGS, DOMAINS, OUT_OF_SCOPE, EVERYDAY, GOOGLE, LANGUAGES)
OWN_TESTS: Final = 40  # of each task
OTHER_TESTS: Final = 120  # of each kind
LARGE: Final = 16  # requests of an intent that a task is made of, at least


@dataclass(frozen=True)
class Layout:
    """How a set is made into tasks."""

    intents: int  # of a task
    domain_of: Callable[[Mapping[str, Any]], str]


SETS: Final[Mapping[str, Layout]] = {
    "clinc150": Layout(3, lambda row: str(row["domain"])),
    "banking77": Layout(4, lambda row: "bank"),
    "hwu64": Layout(2, lambda row: str(row["domain"])),
    "snips": Layout(1, lambda row: str(row["intent"])),
    "xsid": Layout(1, lambda row: str(row["intent"])),
}


@dataclass(frozen=True)
class PublicTask:
    name: str
    train: tuple[str, ...]
    test: tuple[str, ...]


@dataclass(frozen=True)
class PublicBundle:
    """Tasks for one gate, and what it is asked that belongs to none of them."""

    tasks: tuple[PublicTask, ...]
    others: Mapping[str, tuple[str, ...]]  # by kind
    more_siblings: tuple[str, ...] = ()  # for `--not`: they are not asked
    more_elsewhere: tuple[str, ...] = ()  # of other domains and out of scope, as a server's traffic: neither

    @property
    def texts(self) -> Iterator[str]:
        for task in self.tasks:
            yield from (*task.train, *task.test)
        for texts in self.others.values():
            yield from texts


@dataclass(frozen=True)
class PublicData:
    """The rows of one half of all sets."""

    rows: Mapping[str, Sequence[Mapping[str, Any]]]  # by set
    shared: Mapping[str, Sequence[str]]  # requests of no set's tasks, by kind
    out_of_scope: Sequence[str] = ()  # all of them

    @classmethod
    def read(cls, folder: Path, half: Half) -> PublicData:
        """Raises ConfigError: a set is not there."""

        def rows_of(name: str, text: str = "text") -> list[dict[str, Any]]:
            # Repeated requests are one: the same text must not be taught and asked.
            unique = {row[text].casefold(): {**row, "text": row[text]} for row in _read(folder / name)}
            return [row for row in unique.values() if half_of(row["text"]) == half]

        sets = {name: rows_of(name) for name in SETS}
        foreign = [row["text"] for row in sets["xsid"] if row["lang"] != "en"]
        shared = {
            OUT_OF_SCOPE: [row["text"] for row in sets["clinc150"] if row["intent"] is None],
            EVERYDAY: [row["text"] for row in rows_of("everyday")],
            GOOGLE: [row["text"] for row in rows_of("nq_open", "question")],
            LANGUAGES: foreign,
        }
        rng = Random(f"public {half}")
        shared = {kind: rng.sample(texts, min(len(texts), OTHER_TESTS)) for kind, texts in shared.items()}
        out_of_scope = [row["text"] for row in sets["clinc150"] if row["intent"] is None]
        return cls({name: [row for row in rows if _is_own(row)] for name, rows in sets.items()}, shared, out_of_scope)

    def bundle(self, name: str, num_tasks: int, examples: int, seed: int) -> PublicBundle | None:
        """Tasks of a set with that many examples each; None if the set has fewer tasks."""
        layout, rng = SETS[name], Random(f"{name} {num_tasks} {seed}")
        by_domain: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
        for row in self.rows[name]:
            by_domain[layout.domain_of(row)][row["intent"]].append(row["text"])
        chosen: list[tuple[str, list[str]]] = []
        for domain, intents in sorted(by_domain.items()):
            large = sorted(intent for intent, texts in intents.items() if len(texts) > LARGE)
            size = min(layout.intents, max(1, len(intents) // 2)) if len(intents) > 1 else 1
            rng.shuffle(large)
            groups = [large[at : at + size] for at in range(0, len(large) - size + 1, size)]
            # A bank's intents are one domain, which has many tasks; of any other domain one task is taken.
            chosen += [(domain, group) for group in (groups if len(by_domain) == 1 else groups[:1])]
        if len(chosen) < num_tasks:
            return None
        chosen = rng.sample(chosen, num_tasks)
        own = {intent for _, group in chosen for intent in group}
        tasks = tuple(self._task(by_domain[domain], group, examples, rng) for domain, group in chosen)
        domains = {domain for domain, _ in chosen}
        siblings, elsewhere = list[str](), list[str]()
        for domain, intents in sorted(by_domain.items()):
            for intent, texts in sorted(intents.items()):
                if intent not in own:
                    (siblings if domain in domains else elsewhere).extend(texts)
        others = {SIBLINGS: siblings, DOMAINS: elsewhere, **self.shared}
        drawn = {kind: tuple(rng.sample(texts, min(len(texts), OTHER_TESTS))) for kind, texts in others.items()}
        asked = {text for texts in drawn.values() for text in texts}
        more = [text for text in siblings if text not in asked]
        rng.shuffle(more)
        traffic = [text for text in (*elsewhere, *self.out_of_scope) if text not in asked]
        rng.shuffle(traffic)
        return PublicBundle(tasks, {kind: texts for kind, texts in drawn.items() if texts}, tuple(more), tuple(traffic))

    @staticmethod
    def _task(intents: Mapping[str, Sequence[str]], group: Sequence[str], examples: int, rng: Random) -> PublicTask:
        texts = [text for intent in group for text in intents[intent]]
        rng.shuffle(texts)
        count = min(examples, len(texts) - min(OWN_TESTS, len(texts) // 3))  # few are shared out
        return PublicTask("+".join(group), tuple(texts[:count]), tuple(texts[count : count + OWN_TESTS]))


def half_of(text: str) -> Half:
    """One half of the requests chooses a rule, the other reports it."""
    return "report" if hashlib.sha256(text.casefold().encode()).digest()[0] % 2 else "choose"


def _is_own(row: Mapping[str, Any]) -> bool:
    return row["intent"] is not None and row.get("lang", "en") == "en"


def _read(folder: Path) -> list[dict[str, Any]]:
    paths = sorted((*folder.glob("*.jsonl"), *folder.glob("*.jsonl.gz")))
    if not paths:
        raise ConfigError(f"{folder}: expected JSON lines (.jsonl or .jsonl.gz) of this set, found none")
    rows = []
    for path in paths:
        with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as file:
            rows += [json.loads(line) for line in file]
    return rows
