"""Measures the model of `benchmarks.research.real_pictures.train`.

    python -m benchmarks.research.real_pictures.evaluate [--out JSON]

Prints accuracy on base questions by the vendors who drew the pictures and by family, and accuracy on the stream tasks
without memory. Greedy decoding, one question
a prompt, exact match after lower-casing and dropping final punctuation.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.demo.evaluate import Answerer, accuracy
from benchmarks.machine import describe_machine
from benchmarks.real.items import BASE, SPLITS
from benchmarks.real.sources import Packages
from benchmarks.research.real_pictures.concepts import Concepts
from benchmarks.research.real_pictures.icons import PACKAGES
from benchmarks.research.real_pictures.stream import examples, installed_concepts
from benchmarks.research.real_pictures.tasks import TASKS
from benchmarks.research.real_pictures.train import LOG, model_folder
from inducekv_vllm.backbone.checkpoints import require_model_folder
from inducekv_vllm.errors import InduceKVError


def measure(model: Path, concepts: Concepts, packages: Packages, base: int, stream: int) -> dict[str, Any]:
    """`base` questions of each split's vendors, `stream` test questions of each task."""
    answerer = Answerer(model)
    by_vendors = {}
    for split in SPLITS:
        families: dict[str, list[bool]] = defaultdict(list)
        for family, right in accuracy(answerer, list(examples(BASE, split, base, concepts, packages))):
            families[family].append(right)
        rights = [right for of_family in families.values() for right in of_family]
        by_vendors[split] = {
            "vendors": sorted({package.vendor for package in PACKAGES if package.role == split}),
            "overall": _share(rights),
            **{family: _share(of_family) for family, of_family in sorted(families.items())},
        }
    frozen = {
        task: _share([r for _, r in accuracy(answerer, list(examples(task, "test", stream, concepts, packages)))])
        for task in TASKS
    }
    return {
        "base_questions": base,
        "base": by_vendors,
        "stream_questions": stream,
        "frozen": frozen,
    }


def _share(rights: Sequence[bool]) -> float:
    return round(sum(rights) / len(rights), 3)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=model_folder(), help="(default: that of the training)")
    parser.add_argument("--base", type=int, default=366, help="base questions of each split (default %(default)s)")
    parser.add_argument("--stream", type=int, default=64, help="questions of each task (default %(default)s)")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, help="write the result here too")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    try:
        require_model_folder(options.model)
        measured = measure(options.model, installed_concepts(), Packages(), options.base, options.stream)
    except InduceKVError as error:
        print(f"benchmarks.research.real_pictures.evaluate: error: {error}", file=sys.stderr)
        return 2
    log = options.model / LOG
    training = [json.loads(line) for line in log.read_text().splitlines()] if log.is_file() else []
    result = {"benchmark": "real-pictures model", **measured, "training": training, "machine": describe_machine()}
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({key: result[key] for key in measured}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
