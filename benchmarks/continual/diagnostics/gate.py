"""How often the relevance gate opens, and for which task, on test questions that nothing was fitted to.

    python -m benchmarks.continual.diagnostics.gate --out DIR [--method refined] [--budget 32]

DIR is the folder of a finished `python -m benchmarks.continual run`. For the memory after the last task, over all
seeds: of each task's test questions the share that gets memory, and the share that is sent to the task's own entries;
of the base's, the share that gets memory. Ends in one JSON line.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path

from transformers.utils.logging import disable_progress_bar

from benchmarks.continual.suites import load_suite
from benchmarks.demo.model import CHECKPOINT
from inducekv_vllm.bundle import read_bundle
from inducekv_vllm.errors import ConfigError, InduceKVError
from selector.backbone import Backbone
from selector.deployed import openings
from selector.extract import extract_query_keys


def main() -> int:
    options = _parser().parse_args()
    disable_progress_bar()
    try:
        print(json.dumps(measure(options.out, options.data, options.model, options.method, options.budget)))
    except InduceKVError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def measure(out: Path, data: Path | None, model: Path, method: str, budget: int) -> dict:
    """Means over the seeds of a method and budget.

    Raises:
        ConfigError: there is no finished run of them.
    """
    folders = sorted((out / method / f"budget-{budget}").glob("seed-*"))
    if not folders:
        raise ConfigError(f"{out}: there is no run of {method} with budget {budget}")
    suite = load_suite("demo", data or out / "data")
    last = {folder.name: folder / f"{len(suite.tasks) - 1:02d}-{suite.tasks[-1].name}" / "state" for folder in folders}
    missing = [name for name, state in last.items() if not (state / "memory.safetensors").exists()]
    if missing:
        raise ConfigError(f"{out}: the stream of {method} with budget {budget} is not finished: {', '.join(missing)}")
    bundles = [read_bundle(state / "memory.safetensors") for state in last.values()]
    backbone = Backbone.load(model)
    found = {}
    for task in (*suite.tasks, suite.base):
        keys = extract_query_keys(backbone, task.test, batch_size=64)
        shares = [openings(bundle, task.name, keys) for bundle in bundles]
        found[task.name] = {name: round(statistics.mean(share[name] for share in shares), 4) for name in shares[0]}
    found[suite.base.name].pop("own_task")
    return {"diagnostic": "gate", "method": method, "budget": budget, "seeds": list(last), "opened": found}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--data", type=Path, help="(default: OUT/data)")
    parser.add_argument("--model", type=Path, default=CHECKPOINT)
    parser.add_argument("--method", default="refined")
    parser.add_argument("--budget", type=int, default=32)
    return parser


if __name__ == "__main__":
    sys.exit(main())
