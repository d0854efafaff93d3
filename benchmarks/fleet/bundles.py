"""The bundles of a fleet: tasks, facts, both; from 20 KB to 4 MB, most of them small."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from pathlib import Path

from benchmarks.chat import Message
from benchmarks.churn.crowd import PAYLOAD_TOKENS, random_bundle
from inducekv_vllm.backbone.fact_reader import FactReader
from inducekv_vllm.bundle import BackboneFingerprint, Bundle, write_bundle
from inducekv_vllm.teaching import fact_of, taught

KINDS = ("facts", "task", "both")
SMALLEST, LARGEST = 20e3, 4e6  # bytes of a bundle's entries
FACTS = 20
PLAIN = "Which guild bakes bread?"  # what is asked of a bundle without facts


@dataclass(frozen=True)
class Member:
    """A bundle of the fleet."""

    name: str
    kind: str
    question: list[Message]
    answer: str | None  # of a fact; None: what a server answers that has nothing else to do
    num_entries: int

    def file(self, folder: Path) -> Path:
        return folder / f"{self.name}.safetensors"


def make_fleet(model: Path, folder: Path, count: int, seed: int = 0) -> list[Member]:
    """Write so many bundles, the kinds in turn; which ones are large is random, as which ones are asked for often."""
    reader, rng, members = FactReader.of(model), random.Random(seed), []
    for number in range(count):
        member, bundle = made(reader, number, rng)
        write_bundle(bundle, member.file(folder), verify=False)
        members.append(member)
    return members


def made(reader: FactReader, number: int, rng: random.Random) -> tuple[Member, Bundle]:
    """A version of one bundle. Of a bundle with facts, every version answers the same question with another code."""
    name, kind = f"tenant-{number:05d}", KINDS[number % len(KINDS)]
    bundle, answer, question = None, None, PLAIN
    if kind != "facts":
        nbytes = math.exp(rng.uniform(math.log(SMALLEST), math.log(LARGEST)))
        bundle = random_task(reader.model, nbytes, rng.getrandbits(32))
    if kind != "task":
        codes = [f"{rng.choice('BDFGKLMNPRSTVZ')}{rng.randrange(10**6)}" for _ in range(FACTS)]
        facts = [fact_of(f"What is code {place} of {name}?", code) for place, code in enumerate(codes)]
        bundle = taught(bundle, facts, reader).bundle
        question, answer = f"What is code 0 of {name}?", codes[0]
    assert bundle is not None
    return Member(name, kind, [{"role": "user", "content": question}], answer, bundle.num_entries), bundle


def random_task(backbone: BackboneFingerprint, nbytes: float, seed: int) -> Bundle:
    """A task of random entries, of about so many bytes. No two are to give the same answer."""
    heads = backbone.num_layers * backbone.num_kv_heads * PAYLOAD_TOKENS * backbone.head_dim
    entries = max(1, round(nbytes / (2 * (2 * heads + backbone.hidden_size))))
    form = {"weighting": "uniform", "form": "decoupled", "activations": {"task": "generation"}}
    return random_bundle(backbone, entries, seed, "task", **form)
