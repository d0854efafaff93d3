"""The command: see the package."""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.continual.suites import SUITES
from inducekv_vllm.errors import ConfigError, InduceKVError

PROGRAM = "python -m benchmarks.continual"


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        return run(options)
    except InduceKVError as error:
        print(f"{PROGRAM}: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{PROGRAM}: interrupted; run it again with the same arguments to go on", file=sys.stderr)
        return 130


def run(options: argparse.Namespace) -> int:
    """Every method, budget and seed over the stream; ends in one JSON line with the means over seeds.

    RESULTS, where asked for, also holds every run's matrix, base accuracies, bytes and seconds.
    """
    import torch
    from transformers.utils.logging import disable_progress_bar

    from benchmarks.continual.answering import OfflineAnswerer
    from benchmarks.continual.methods import choose_methods
    from benchmarks.continual.stream import Run, brief, claim, compare, run_stream, write_json
    from benchmarks.continual.suites import load_suite
    from benchmarks.machine import describe_machine
    from inducekv_vllm.fingerprint import require_model_folder

    disable_progress_bar()
    if options.threads:
        torch.set_num_threads(options.threads)
    methods = choose_methods(options.method, options.set)
    require_model_folder(options.model)
    if min(options.budget) < 1 or min(options.seed) < 0:
        raise ConfigError(f"budgets must be positive and seeds not negative, found {options.budget}, {options.seed}")
    suite = load_suite(options.suite, options.data or options.out / "data")
    if options.order != ["default"]:
        suite = suite.ordered(options.order)
    suite = suite.asked_about(options.split).limited(options.test_limit, options.base_limit)
    configuration = {
        "suite": suite.name,
        "data": suite.digest(),
        "order": [task.name for task in suite.tasks],
        "model": {"name": options.model.name, "weights": weights_digest(options.model)},
        "split": options.split,
        "test_limit": options.test_limit,
        "base_limit": options.base_limit,
    }
    claim(options.out, "run.json", configuration)
    done = []
    for method in methods:
        for budget in options.budget:
            for seed in options.seed:
                one = Run(suite, method, options.model, budget, seed, options.out)
                done.append(run_stream(one, OfflineAnswerer(options.model), lambda line: print(line, file=sys.stderr)))
    results = {"benchmark": "continual", **configuration, "machine": describe_machine(), "results": compare(done)}
    if options.results:
        options.results.parent.mkdir(parents=True, exist_ok=True)
        write_json(options.results, {**results, "runs": [brief(one) for one in done]})
    print(json.dumps(results))
    return 0


def weights_digest(model: Path) -> str:
    """sha256 over the model's safetensors files; where the folder lies does not matter."""
    digest = hashlib.sha256()
    for path in sorted(model.glob("*.safetensors")):
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=PROGRAM, description="Continual-learning benchmark.")
    commands = parser.add_subparsers(required=True)
    one = commands.add_parser("run", help="run methods over a stream, or go on with a run that was killed")
    add = one.add_argument
    add("--suite", choices=tuple(SUITES), default="demo")
    add("--model", type=Path, help="(default: the demo model)", default=_demo_model())
    add("--method", nargs="+", required=True)
    add("--budget", nargs="+", type=int, default=[32], help="entries of memory; other methods get their bytes")
    add("--order", nargs="+", default=["default"], help="names of tasks, in the order of learning")
    add("--seed", nargs="+", type=int, default=[0])
    add("--out", type=Path, required=True, help="the folder of the results")
    add("--results", type=Path, metavar="FILE", help="write everything but the predictions into one JSON file")
    add("--data", type=Path, help="the suite's data, made there if it is not (default: OUT/data)")
    add("--split", choices=("test", "validation"), default="test", help="what is asked; validation to choose settings")
    add("--test-limit", type=int, default=256, help="questions of each task (default 256)")
    add("--base-limit", type=int, default=270, help="base questions (default 270)")
    add("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of the methods that have it")
    add("--threads", type=int, default=0, help="of torch (default: its own choice)")
    return parser


def _demo_model() -> Path:
    from benchmarks.demo.model import CHECKPOINT

    return CHECKPOINT


if __name__ == "__main__":
    sys.exit(main())
