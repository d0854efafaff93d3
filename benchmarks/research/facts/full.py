"""Which facts stay when a bundle is full: policies, by the share of requests whose fact is still there.

    python -m benchmarks.research.facts.full [--seeds N] [--output FILE]

5,000 airport codes are taught one after the other, with room for 1,000 (25 more go together), and after each come four
requests for facts taught so far. Popularity follows Zipf's law with exponent 1, in a random order of the facts.
"Steady": it never changes. "Fading": it halves with every 500 facts taught since. Nothing is served: a fact that is
there is found (see `refusal.py`). Prints a table in Markdown.

    newest     the oldest go (recency)
    first      new ones are refused
    used       those go that were asked for least often since they were taught, the oldest of equals (frequency)
    lately     those go whose last request, or teaching, is longest ago
    k-center   those go that are closest to another
    log-det    those go that add least to log det(I + K), K the cosines of facts
    log-det, asked    the same plus the log of the share of requests that asked for it, as a likelihood (the paper's)

Facts are compared by the mean of their questions' word vectors; what all questions share is no part of it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from benchmarks.machine import describe_machine
from benchmarks.real.model import model_folder
from benchmarks.real.sources import Packages
from inducekv_vllm.backbone.stored_facts import FactReader
from inducekv_vllm.facts import words_of

RESULTS: Final = Path(__file__).parents[2] / "results" / "facts_full.json"
FACTS, ROOM, REQUESTS, FADES_IN = 5000, 1000, 4, 500
FACTS_AT_ONCE: Final = 25  # that go in one step
DEMANDS: Final = ("steady", "fading")
Array = npt.NDArray[np.float64]


@dataclass
class Store:
    """The facts that are there, by their numbers in the order of teaching, and what is known of them."""

    vectors: Array  # [N, d], norm 1
    there: list[int] = field(default_factory=list)
    uses: Array = field(init=False)  # [N]
    last: Array = field(init=False)  # [N], the time of the last use, or of teaching
    taught: Array = field(init=False)  # [N], the requests before it

    def __post_init__(self) -> None:
        self.uses, self.last, self.taught = (np.zeros(len(self.vectors)) for _ in range(3))

    @property
    def cosines(self) -> Array:
        own = self.vectors[self.there]
        return own @ own.T


Policy = Callable[[Store, float], Array]  # from the store and the time to scores [n]: the facts with the lowest go


def newest(store: Store, now: float) -> Array:
    return np.array(store.there, dtype=np.float64)


def first(store: Store, now: float) -> Array:
    return -newest(store, now)


def used(store: Store, now: float) -> Array:
    """Facts that have just been taught had no time to be asked for."""
    young = now - store.taught[store.there] < REQUESTS * FACTS_AT_ONCE
    return np.where(young, np.inf, store.uses[store.there] + newest(store, now) / FACTS)


def lately(store: Store, now: float) -> Array:
    return store.last[store.there]


def k_center(store: Store, now: float) -> Array:
    cosines = store.cosines
    np.fill_diagonal(cosines, -1.0)
    nearest = np.sort(cosines, axis=1)[:, -2:]  # the two closest others
    return -nearest[:, 1] - nearest[:, 0] / FACTS


def log_det(store: Store, now: float) -> Array:
    """What each fact adds to log det(I + K), by Schur's complement: -log of the diagonal of the inverse."""
    return -np.log(np.diag(np.linalg.inv(np.eye(len(store.there)) + store.cosines)))


def log_det_asked(store: Store, now: float) -> Array:
    asked = (store.uses[store.there] + 1) / (now - store.taught[store.there] + FACTS)
    return log_det(store, now) + np.log(asked)


POLICIES: Final[dict[str, Policy]] = {
    "newest": newest,
    "first": first,
    "used": used,
    "lately": lately,
    "k-center": k_center,
    "log-det": log_det,
    "log-det, asked": log_det_asked,
}


def served(policy: str, vectors: Array, demand: str, seed: int) -> float:
    """The share of requests, from the first full moment on, whose fact was there."""
    rng = np.random.default_rng(seed)
    popularity = 1 / (1 + rng.permutation(len(vectors)))
    store, hits, asked, now = Store(vectors), 0, 0, 0
    for number in range(len(vectors)):
        store.there.append(number)
        store.taught[number] = store.last[number] = now
        if len(store.there) == ROOM + FACTS_AT_ONCE:
            stay = np.argsort(POLICIES[policy](store, now), kind="stable")[FACTS_AT_ONCE:]
            store.there = sorted(store.there[place] for place in stay)
        weights = popularity[: number + 1]
        if demand == "fading":
            weights = weights * 0.5 ** ((number - np.arange(number + 1)) / FADES_IN)
        there = set(store.there)
        for wanted in rng.choice(number + 1, REQUESTS, p=weights / weights.sum()):
            now += 1
            if wanted in there:
                store.uses[wanted] += 1
                store.last[wanted] = now
            if number >= ROOM:
                asked += 1
                hits += int(wanted in there)
    return hits / asked


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--output", type=Path, default=RESULTS)
    args = parser.parse_args()
    vectors = vectors_of([airport.code for airport in Packages().airports][:FACTS])
    rows: list[dict[str, Any]] = []
    for policy in POLICIES:
        for demand in DEMANDS:
            shares = [served(policy, vectors, demand, seed) for seed in range(args.seeds)]
            rows.append({"policy": policy, "demand": demand, "served": shares})
            print(rows[-1], file=sys.stderr)
    print("| policy | steady | fading |\n|---|---|---|")
    for policy in POLICIES:
        cells = [np.mean(row["served"]) for row in rows if row["policy"] == policy]
        print(f"| {policy} | {' | '.join(f'{cell:.3f}' for cell in cells)} |")
    args.output.write_text(json.dumps({"machine": describe_machine(), "rows": rows}, indent=1) + "\n")
    return 0


def vectors_of(codes: list[str]) -> Array:
    """[N, d], norm 1."""
    reader = FactReader.of(model_folder())
    found = np.stack([reader.vectors(words_of(code)).mean(0) for code in codes]).astype(np.float64)
    return found / np.linalg.norm(found, axis=1, keepdims=True)


if __name__ == "__main__":
    sys.exit(main())
