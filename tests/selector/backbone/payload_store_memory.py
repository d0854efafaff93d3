"""How much memory a pool of candidates takes; `test_payload_store` runs it as a process with a peak of its own.

    python -m tests.selector.backbone.payload_store_memory MODEL TASK.jsonl FOLDER|- COUNT M SHORTLIST [LIMIT]

Extracts COUNT candidates into FOLDER, or into memory for "-", takes SHORTLIST of them, then runs a loss over all of
them and back; prints one JSON line. With LIMIT the system refuses more than so many bytes of private memory beyond
what a first small pool has needed.
"""

from __future__ import annotations

import hashlib
import json
import re
import resource
import sys
from dataclasses import replace
from pathlib import Path

import torch

from selector.backbone.extraction import extract
from selector.backbone.model import Backbone
from selector.backbone.payload_store import PayloadStore
from selector.backbone.scoring import Questions, Scorer
from selector.backbone.tiled_attention import tiled_attention
from selector.data.examples import Example, read_task
from selector.paper.calibration import Calibration, leaf
from selector.paper.candidate_pool import CandidatePool
from selector.paper.objective import Objective


def status(name: str) -> int:
    """A number of bytes from /proc/self/status."""
    return int(re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024


def peak() -> int:
    """This program's own peak: getrusage would go on from that of the process that has started it."""
    return status("VmHWM")


def private() -> int:
    """Bytes of private writable memory, which RLIMIT_DATA counts; maps of files are none."""
    return status("VmData")


def make(backbone: Backbone, examples: list[Example], m: int, folder: Path | None) -> CandidatePool:
    shape = (backbone.num_layers, len(examples), backbone.num_kv_heads, m, backbone.head_dim)
    pool = PayloadStore.open(folder, shape, None) if folder else None
    extraction = extract(backbone, examples, m, payload_dtype=torch.float16, store=pool)
    return CandidatePool.join(None, extraction, examples)


def run_over_all(backbone: Backbone, candidates: CandidatePool, examples: list[Example]) -> list[float]:
    """A loss under all candidates with equal weights, and its gradient by the calibration."""
    questions = Questions(examples[:2], candidates.keys[:2])
    objective = Objective(Scorer(backbone), candidates, questions, questions, 4, "sqrt", 2, 0)
    weights = torch.full((len(candidates),), 4 / len(candidates), dtype=torch.float64)
    phi = leaf(Calibration.initial(backbone.num_layers).phi)
    with tiled_attention(backbone):
        loss = objective.current_loss(weights, phi, (0,))
        (gradient,) = torch.autograd.grad(loss, phi)
    return [float(loss), *gradient.tolist()]


def main() -> None:
    model, task, folder = sys.argv[1], sys.argv[2], None if sys.argv[3] == "-" else Path(sys.argv[3])
    count, m, shortlist, *limit = map(int, sys.argv[4:])
    torch.set_num_threads(1)
    backbone, examples = Backbone.load(model), read_task(task)
    many = [replace(examples[number % len(examples)], id=f"c{number}") for number in range(count)]
    # What loading and the first passes allocate is not the pool's.
    run_over_all(backbone, make(backbone, many[:16], m, folder and folder / "first"), many)
    if limit:
        allowed = private() + limit[0]
        resource.setrlimit(resource.RLIMIT_DATA, (allowed, allowed))
    before = peak()
    candidates = make(backbone, many, m, folder and folder / "all")
    taken = candidates.take(torch.arange(0, count, count // shortlist)[:shortlist])
    growth = peak() - before
    digest = hashlib.sha256()
    for tensor in (taken.keys, taken.payload_keys, taken.payload_values):
        digest.update(tensor.numpy().tobytes())
    size = 2 * candidates.payload_keys.numel() * candidates.payload_keys.element_size()
    found = {"pool_bytes": size, "growth_bytes": growth, "digest": digest.hexdigest()}
    print(json.dumps(found | {"loss_and_gradient": run_over_all(backbone, candidates, many)}))


if __name__ == "__main__":
    main()
