"""The relevance gate on other people's requests, beside classifiers that are not ours.

    python -m benchmarks.research.gate.public --data DIR --model MODEL [--sets NAME ...] [--tasks 1 3 8]
        [--examples 8 32 128] [--seeds 0 1 2] [--half report] [--out FILE]

DIR has a folder of JSON lines for each set: clinc150, banking77, hwu64, snips and xsid with `text`, `intent` (null: out
of scope), `domain` or `lang`; everyday with `text`, nq_open with `question`. Nothing of it is stored in the results. A
bundle has one task to eight, a task is some intents with some examples. Of its own test requests, `routed` are sent to
their task, and `routed_wrapped` with a phrase around them that no fit has; of all others, the shares that open the gate
are given by kind: once as it is fitted, and once with the threshold that lets 95% of its own through. `auroc` is that
of the largest margin, own requests against those out of scope.

Every cell is written when it is done, and not computed again: run it as often as it is interrupted.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.machine import describe_machine
from benchmarks.real.model import cache_folder
from benchmarks.research.gate.public_rivals import MeanStates, rival_scores
from benchmarks.research.gate.public_sets import OUT_OF_SCOPE, SETS, PublicBundle, PublicData
from benchmarks.research.gate.wordings import read_lists
from inducekv_vllm.backbone.meaning import SentenceEncoder
from inducekv_vllm.backbone.turns import message
from inducekv_vllm.bundle import Gate
from inducekv_vllm.bundle.source import source_digest_of
from inducekv_vllm.errors import InduceKVError
from selector.backbone.model import Backbone
from selector.backbone.token_values import evidence_of
from selector.data.examples import Example
from selector.gate.data import GateData
from selector.gate.fit import fit_gate
from selector.gate.settings import GateOptions
from selector.runtime.files import replace_file

PROGRAM: Final = "python -m benchmarks.research.gate.public"
RESULTS: Final = Path(__file__).parents[2] / "results" / "gate_public.json"
GATE: Final = "gate"
RECALL: Final = 0.95
Margins = npt.NDArray[np.float64]  # [n, C]


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    if options.threads:
        torch.set_num_threads(options.threads)
    try:
        run(options)
    except InduceKVError as error:
        print(f"{PROGRAM}: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0


def run(options: argparse.Namespace) -> None:
    data = PublicData.read(options.data, options.half)
    backbone = Backbone.load(options.model, getattr(torch, options.dtype))
    encoder = None if options.encoder is None else SentenceEncoder(str(options.encoder))
    states = None
    if not options.no_states:
        states = MeanStates(backbone, options.cache / f"{backbone.fingerprint.weights_digest[:16]}.pt")
    cells = known_cells(options.out)
    for seed, examples, num_tasks, name in itertools.product(
        options.seeds, options.examples, options.tasks, options.sets
    ):
        key = {"set": name, "tasks": num_tasks, "examples": examples, "seed": seed, "half": options.half}
        key |= {"near_misses": options.near_misses, "traffic": options.traffic, "layers": options.layers}
        cell = next((cell for cell in cells if key.items() <= {"traffic": 0, "layers": None, **cell}.items()), None)
        bundle = data.bundle(name, num_tasks, examples, seed)
        if bundle is None:
            continue
        if cell is None:
            cells.append(cell := {**key, "had": [len(task.train) for task in bundle.tasks], "methods": {}})
        known = set(cell["methods"]) | ({GATE} if options.rivals_alone else set())
        for method, measured in measure(bundle, backbone, (states, encoder), options, seed, known):
            cell["methods"][method] = measured
            result = {"benchmark": "gate_public", "model": options.model.name, "dtype": options.dtype, "cells": cells}
            replace_file(options.out, (json.dumps({**result, "machine": describe_machine()}, indent=1) + "\n").encode())
            print(f"{name}, {num_tasks} tasks of {examples}, seed {seed}: {method}: {json.dumps(measured)}", flush=True)


def known_cells(path: Path) -> list[dict[str, Any]]:
    """Of earlier runs."""
    cells: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["cells"] if path.is_file() else []
    return cells


def measure(
    bundle: PublicBundle,
    backbone: Backbone,
    features: tuple[MeanStates | None, SentenceEncoder | None],
    options: argparse.Namespace,
    seed: int,
    known: set[str],
) -> Iterator[tuple[str, dict[str, Any]]]:
    """The measures of each method that is not known."""
    asked = [text for task in bundle.tasks for text in task.test] + [t for ts in bundle.others.values() for t in ts]
    if GATE not in known:
        given = bundle.more_siblings[: options.near_misses]
        traffic = bundle.more_elsewhere[: options.traffic]
        layers = None if options.layers is None else tuple(options.layers)
        yield GATE, _of_gate(bundle, backbone, asked, given, traffic, options.misses, layers, seed)
    if not known - {GATE} and not options.gate_alone:
        for rival, scores in rival_scores(bundle, asked, *features).items():
            took = {"fit_seconds": round(scores.seconds, 2), "decision_ms": round(scores.milliseconds, 3)}
            yield rival, {**shares(bundle, scores.margins), **took}


def _of_gate(
    bundle: PublicBundle,
    backbone: Backbone,
    asked: Sequence[str],
    given: Sequence[str],
    traffic: Sequence[str],
    misses: float | None,
    layers: tuple[int, ...] | None,
    seed: int,
) -> dict[str, Any]:
    own = {task.name: [example(text, task.name) for text in task.train] for task in bundle.tasks}
    began = time.perf_counter()
    near_misses = [example(text, "near-miss") for text in given]
    background = [example(text, "traffic") for text in traffic]
    data = GateData(own, (), background, near_misses)
    fitted = fit_gate(backbone, data, GateOptions(misses, seed, "classifiers", layers))
    gate, seconds = fitted.gate, time.perf_counter() - began
    around = wrapped([text for task in bundle.tasks for text in task.test], seed)
    evidence = evidence_of(backbone, gate, [example(text, "asked") for text in (*asked, *around)]).numpy()  # [n + o, H]
    rule, words, began = gate.rule, gate.word_scores, time.perf_counter()
    margins = np.stack([rule.decide(each).margins for each in evidence])  # [n, C]
    if words is not None:
        for text in asked:
            words.evidence(text)
    each = 1000 * (time.perf_counter() - began) / len(asked)
    took = {"fit_seconds": round(seconds, 1), "decision_ms": round(each, 3), "bytes": bytes_of(gate)}
    found = shares(bundle, margins[: len(asked)]) | {"routed_wrapped": routed(bundle, margins[len(asked) :])}
    return {**found, **took, "warnings": list(fitted.warnings)}


def wrapped(texts: Sequence[str], seed: int) -> list[str]:
    """With phrases around them that no fit has."""
    rng = Random(f"wrapped {seed}")
    return [rng.choice(read_lists().wrappers).replace("{question}", text) for text in texts]


def routed(bundle: PublicBundle, own: Margins) -> float:
    """The share of the tasks' test requests [o, C] that are sent to their task."""
    labels = np.array([at for at, task in enumerate(bundle.tasks) for _ in task.test])
    return float(((own.argmax(axis=1) == labels) & (own.max(axis=1) >= 0)).mean())


def shares(bundle: PublicBundle, margins: Margins) -> dict[str, Any]:
    """Of own requests those routed to their task, of each kind of others those that open.

    Args:
        margins: [n, C], of the tasks' test requests and then of the others, in the order of the bundle.
    """
    labels = np.array([at for at, task in enumerate(bundle.tasks) for _ in task.test])
    own, largest = margins[: len(labels)], margins.max(axis=1)
    kinds, at = {}, len(labels)
    for kind, texts in bundle.others.items():
        kinds[kind] = largest[at : at + len(texts)]
        at += len(texts)
    # As many of its own are let through as RECALL says, whichever task they are sent to.
    least = float(np.quantile(largest[: len(labels)], 1 - RECALL, method="lower"))
    return {
        "routed": routed(bundle, own),
        "right_task": float((own.argmax(axis=1) == labels).mean()),
        "opened": {kind: float((of_kind >= 0).mean()) for kind, of_kind in kinds.items()},
        "opened_at_95": {kind: float((of_kind >= least).mean()) for kind, of_kind in kinds.items()},
        "auroc": auroc(largest[: len(labels)], kinds[OUT_OF_SCOPE]),
        "asked": {"own": len(labels), **{kind: len(of_kind) for kind, of_kind in kinds.items()}},
    }


def auroc(own: npt.NDArray[np.float64], others: npt.NDArray[np.float64]) -> float:
    """How often one of the own scores is above one of the others', a tie counting half."""
    above = (own[:, None] > others[None]).mean() + (own[:, None] == others[None]).mean() / 2
    return float(above)


def example(text: str, task: str) -> Example:
    messages = (message("user", text),)
    return Example(text, task, messages, (), "", source_digest_of(messages, []))


def bytes_of(gate: Gate) -> int:
    return sum(tensor.nbytes for tensor in gate.tensors().values())


def _parser() -> argparse.ArgumentParser:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog=PROGRAM, description=__doc__, formatter_class=formatter)
    add = parser.add_argument
    add("--data", type=Path, required=True, help="the folder with a folder for each set")
    add("--model", type=Path, required=True)
    add("--sets", nargs="+", choices=tuple(SETS), default=tuple(SETS))
    add("--tasks", nargs="+", type=int, default=[3], help="of a bundle (default: 3)")
    add("--examples", nargs="+", type=int, default=[128], help="of a task (default: 128)")
    add("--seeds", nargs="+", type=int, default=[0], help="(default: 0)")
    add("--near-misses", type=int, default=0, help="sibling requests that are given as `--not` (default: 0)")
    add(
        "--traffic", type=int, default=0, help="other requests of the set that are given as `--background` (default: 0)"
    )
    add("--half", choices=("choose", "report"), default="report", help="of the requests (default: %(default)s)")
    add("--misses", type=float, help="of own questions (default: that of `fit_gate`)")
    add("--layers", nargs="+", type=int, help="that the gate looks at (default: those of `fit_gate`)")
    alone = parser.add_mutually_exclusive_group()
    alone.add_argument("--gate-alone", action="store_true", help="without the rivals")
    alone.add_argument("--rivals-alone", action="store_true", help="without the gate")
    add("--encoder", type=Path, help="a sentence encoder, for a rival by its vectors")
    add("--no-states", action="store_true", help="without the rivals that look at the model's states")
    add("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the model (default: %(default)s)")
    add("--cache", type=Path, default=cache_folder() / "gate-public", help="of the model's states, which take longest")
    add("--threads", type=int, default=0, help="of torch (default: its own choice)")
    add("--out", type=Path, default=RESULTS, metavar="FILE.json", help="(default: %(default)s)")
    return parser


def means(cells: Sequence[Mapping[str, Any]], method: str) -> dict[str, float]:
    """Of a method over cells: each measure's mean over sets, of a set over its cells; kinds under "opened KIND"."""
    numbers: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for cell in cells:
        row = cell["methods"].get(method, {})
        for name in ("routed", "routed_wrapped", "auroc", "fit_seconds", "decision_ms", "bytes"):
            if name in row:
                numbers[name][cell["set"]].append(row[name])
        for name in ("opened", "opened_at_95"):
            for kind, share in row.get(name, {}).items():
                numbers[f"{name} {kind}"][cell["set"]].append(share)
    return {name: float(np.mean([np.mean(of_set) for of_set in sets.values()])) for name, sets in numbers.items()}


if __name__ == "__main__":
    sys.exit(main())
