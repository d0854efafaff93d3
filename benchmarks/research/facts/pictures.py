"""Facts about pictures: half of the things are stored with a picture each, all are asked about in pictures.

    python -m benchmarks.research.facts.pictures [--model DIR] [--seeds N] [--output FILE]

Emoji as vendors draw them, by default for the demo model, whose tower has never seen one. `right` is the share of
questions about stored things that their own fact is found for, `wrong` another one; `unknown` the share of questions
about other things that a fact is found for. The wording is not a stored one. Prints a table in Markdown; the engine
answers that serves.
"""

from __future__ import annotations

import argparse
import io
import json
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from PIL import Image, ImageEnhance

from benchmarks.chat import Message, user_turn
from benchmarks.machine import describe_machine
from benchmarks.research.facts.seeds_table import seeds_table
from benchmarks.research.real_pictures.concepts import Concept, Concepts
from benchmarks.research.real_pictures.drawings import drawing, picture
from benchmarks.research.real_pictures.icons import Role
from benchmarks.research.real_pictures.stream import installed_concepts
from inducekv_vllm.teaching import fact_of
from server.demo import CHECKPOINT

if TYPE_CHECKING:
    from vllm import LLM

    from inducekv_vllm.frontend.served_bundle import ServedBundle

RESULTS: Final = Path(__file__).parents[2] / "results" / "facts_pictures.json"
STORED: Final = (4, 16, 96)  # things
QUESTION, ASKED = "What is this called?", "Tell me the name of the thing in this picture."
Picture = Image.Image


def jpeg(original: Picture) -> Picture:
    written = io.BytesIO()
    original.save(written, "JPEG", quality=60)
    return Image.open(written).convert("RGB")


def cropped(original: Picture) -> Picture:
    """4% of each side are missing."""
    width, height = original.size
    return original.crop((width // 24, height // 24, width - width // 24, height - height // 24)).resize(original.size)


KINDS: Final[Mapping[str, Callable[[Picture], Picture]]] = {
    "the same picture": lambda original: original,
    "JPEG, quality 60": jpeg,
    "10% brighter": lambda original: ImageEnhance.Brightness(original).enhance(1.1),
    "cropped by 4%": cropped,
}


class Drawn:
    """Pictures of things."""

    def __init__(self, concepts: Concepts) -> None:
        self._concepts = concepts

    def of(self, concept: Concept, strength: float = 0.0, seed: int = 0, role: Role = "test") -> Picture:
        """As the vendor of a role draws it; `strength` scales how it is turned, moved, stretched and mirrored."""
        (drawn, *_) = self._concepts.drawn_by(role, concept)
        rng = np.random.default_rng([seed, *concept.name.encode()])
        return Image.fromarray(picture(drawing(drawn, concept.name), rng, strength))

    def kinds(self, concept: Concept) -> dict[str, Picture]:
        stored = self.of(concept)
        found = {kind: changed(stored) for kind, changed in KINDS.items()}
        found["moved and turned a little"] = self.of(concept, 0.3, seed=1)
        found["another vendor's drawing"] = self.of(concept, role="validation")
        return found


class Asked:
    """An engine, and the bundles that are taught in it."""

    def __init__(self, llm: LLM, folder: Path) -> None:
        from inducekv_vllm.frontend.offline import MemoryLLM

        self.offline, self._folder = MemoryLLM(llm), folder

    def teach(self, pictures: Mapping[str, Picture]) -> ServedBundle:
        states = {name: self.offline.picture_state([_turn(each, QUESTION)]) for name, each in pictures.items()}
        facts = [fact_of(QUESTION, name, id=name, picture=state) for name, state in states.items()]
        memory, _ = self.offline.teach(facts, self._folder / "facts.safetensors")
        return memory

    def found(self, memory: ServedBundle, pictures: Sequence[Picture]) -> list[str | None]:
        """The fact that is found for each."""
        from vllm import SamplingParams

        conversations = [[_turn(each, ASKED)] for each in pictures]
        answers = self.offline.chat(conversations, SamplingParams(temperature=0, max_tokens=1), memory=memory)
        facts = [None if each.decision is None else each.decision.facts for each in answers]
        return [None if each is None else memory.metadata.facts[each.facts[0]].id for each in facts]


def _turn(shown: Picture, question: str) -> Message:
    return user_turn(np.asarray(shown), question)


def measure(asked: Asked, drawn: Drawn, things: Sequence[Concept], stored: int, seed: int) -> list[dict[str, Any]]:
    chosen = Random(seed).sample(things, len(things))
    known, unknown = chosen[:stored], chosen[len(chosen) // 2 :]
    memory = asked.teach({each.name: drawn.of(each) for each in known})
    own, others = [drawn.kinds(each) for each in known], [drawn.kinds(each) for each in unknown]
    rows = []
    for kind in own[0]:
        found = asked.found(memory, [each[kind] for each in own])
        names = [each.name for each in known]
        row = {
            "right": sum(a == b for a, b in zip(found, names, strict=True)) / len(names),
            "wrong": sum(a not in (None, b) for a, b in zip(found, names, strict=True)) / len(names),
            "unknown": sum(each is not None for each in asked.found(memory, [each[kind] for each in others]))
            / len(others),
        }
        rows.append({"stored": str(stored), "picture": kind, "seed": seed} | row)
        print(rows[-1], file=sys.stderr)
    asked.offline.unload_bundle(memory)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=CHECKPOINT, help="a model folder (default: the demo's)")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--output", type=Path, default=RESULTS)
    args = parser.parse_args()
    from benchmarks.research.facts.engine import facts_engine

    concepts = installed_concepts()
    things, drawn, rows = [*concepts.base, *concepts.new], Drawn(concepts), []
    with tempfile.TemporaryDirectory() as folder:
        asked = Asked(facts_engine(args.model, 256), Path(folder))
        for stored in STORED:
            for seed in range(args.seeds):
                rows += measure(asked, drawn, things, stored, seed)
    print(seeds_table(rows, ("stored", "picture")))
    result = {"model": args.model.name, "machine": describe_machine(), "pictures": rows}
    args.output.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
