"""What memory teaches the hybrid, over HTTP: `python -m benchmarks.hybrid.proof --work DIR --output FILE`.

The model is trained, if DIR has none. Then it learns a rule from examples about some things and is asked about others;
and facts, which follow no rule. Beside these, it is asked what it knew before, with the same memory loaded.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from rich.console import Console

import selector
from benchmarks.chat import same_answer
from benchmarks.demo.run_demo import MEMORY, ask, base_model, gate_is_open, served, server_arguments
from benchmarks.hybrid.train import train
from benchmarks.hybrid.world import THINGS, base_questions, guilds, owners
from benchmarks.record import keep, parser_of
from inducekv_vllm.bundle import read_bundle
from selector.backbone.model import Backbone

# vLLM's operator for CPUs takes LFM2's queries for those of one head.
OPTIONS = ("--compilation-config", '{"custom_ops": ["-rotary_embedding"]}', "--enforce-eager")
LEARNED, VALIDATED = 30, 6  # things of the rule; the others are asked about
OWNED = 10
BASE = 60  # questions that the gate is shown, and as many that are asked


def teach(model: Path, bundle: Path) -> dict[str, Any]:
    """Teach the rule, then the facts; what was chosen for each."""
    backbone, things = Backbone.load(model), list(THINGS)
    began = time.perf_counter()
    rule = selector.teach(
        backbone,
        list(guilds(things[:LEARNED])),
        task="guild",
        validation=list(guilds(things[LEARNED : LEARNED + VALIDATED])),
        base=base_questions(BASE, 0),
    )
    both = selector.teach(
        backbone,
        list(owners(things[:OWNED])),
        task="owner",
        validation=[row | {"prompt": in_words(row["prompt"], "Do you know")} for row in owners(things[:OWNED])],
        base=base_questions(BASE, 0),
        previous=rule,
        output=bundle,
    )
    metadata = both.bundle.metadata
    return {
        "seconds": round(time.perf_counter() - began, 1),
        "layers": [backbone.num_layers, backbone.model.config.num_hidden_layers],
        "attention_layers": metadata.backbone.attention_layers,
        "activations": metadata.activations,
        "facts": len(metadata.facts),
        "gate_layers": metadata.gate and metadata.gate.layers,
    }


def in_words(question: str, before: str) -> str:
    return f"{before} {question[0].lower()}{question[1:]}"


def questions() -> list[tuple[str, str, str]]:
    """Task, question and answer."""
    things = list(THINGS)
    asked = [("guild", row["prompt"], row["answer"]) for row in guilds(things[LEARNED + VALIDATED :])]
    for row in owners(things[:OWNED]):
        asked.append(("owner", row["prompt"], row["answer"]))
        asked.append(("owner, in other words", in_words(row["prompt"], "Please tell me"), row["answer"]))
    return [*asked, *(("base", row["prompt"], row["answer"]) for row in base_questions(BASE, 1))]


def answered(client: Any) -> dict[str, dict[str, int]]:
    """By task: how many were asked, right without and with memory, and for how many the gate was open."""
    base, found = base_model(client, MEMORY), defaultdict[str, dict[str, int]](dict)
    for task, question, answer in questions():
        messages: Any = [{"role": "user", "content": question}]
        plain = ask(client, base, messages, trace=False)
        memory = ask(client, MEMORY, messages, trace=True)
        assert memory.trace is not None
        counts = {
            "asked": 1,
            "right_without": int(same_answer(plain.text, answer)),
            "right_with": int(same_answer(memory.text, answer)),
            "open": int(gate_is_open(memory.trace)),
            "stored_answers": len(memory.trace["facts"]),
        }
        found[task] = {name: found[task].get(name, 0) + count for name, count in counts.items()}
    return dict(found)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=90, help="of training the model")
    args = parser.parse_args()
    model, bundle, trained = args.work / "model", args.work / "memory.safetensors", args.work / "trained.json"
    if not trained.exists():
        made = train(model, 10_000, args.seconds)
        trained.write_text(json.dumps(made))
    found: dict[str, Any] = {"model": json.loads(trained.read_text())}
    found["taught"] = teach(model, bundle)
    found["bundle_bytes"] = bundle.stat().st_size
    assert read_bundle(bundle).metadata.backbone.attention_layers is not None
    console = Console(width=100)
    with served(model, bundle, [*server_arguments(model, bundle), *OPTIONS], console) as client:
        found["answered"] = answered(client)
    keep(found, args.output)


if __name__ == "__main__":
    main()
