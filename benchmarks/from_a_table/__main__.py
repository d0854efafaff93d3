"""Learn, ask, report."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import benchmarks.from_a_table as about
from benchmarks.from_a_table.asked import ask_all
from benchmarks.from_a_table.learned import RATES, WAYS, Rows, learned
from benchmarks.from_a_table.table import table
from benchmarks.record import keep, parser_of
from inducekv_vllm.errors import InduceKVError
from selector.cli.columns import ColumnOptions
from selector.data.examples import read_task

TABLES = Path(__file__).parents[2] / "docs" / "examples" / "support"
PROGRAM = "python -m benchmarks.from_a_table"
LENGTHS = (64, 128, 256, 512, 1024)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    try:
        run(options)
    except InduceKVError as error:
        print(f"{PROGRAM}: error: {error}", file=sys.stderr)
        return 2
    return 0


def run(options: argparse.Namespace) -> None:
    columns = ColumnOptions(columns=options.columns, task_name="support").of_table()
    questions = read_task(options.questions, columns)
    base = read_task(options.base) if options.base else []
    gate = read_task(options.base_train) if options.base_train else []
    rows = Rows(options.model, read_task(options.task, columns), gate, options.rates)
    ways = []
    for name in options.ways:
        ways.append(learned(name, WAYS[name], rows, options.work))
        print(f"{name}: {ways[-1].seconds} s, {ways[-1].artifact.stored_bytes} bytes", flush=True)
    found, times = ask_all(
        *(options.model, ways, questions, base, options.lengths, options.rounds, options.work),
        options.serve_args,
    )
    size = {
        way.name: {"seconds": way.seconds, "cpu_seconds": way.cpu_seconds, "bytes": way.artifact.stored_bytes}
        for way in ways
    }
    counts = {"rows": len(rows.rows), "questions": len(questions), "base": len(base)}
    result = {
        "benchmark": "from_a_table",
        "model": options.model.name,
        **counts,
        "methods": {name: size[name] | found[name] for name in size},
        "first_token": times,
    }
    print(table(result))
    keep(result, options.output)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = parser_of(about.__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True, help="keeps what is learned, and the servers' logs")
    parser.add_argument("--task", type=Path, default=TABLES / "train.csv")
    parser.add_argument("--questions", type=Path, default=TABLES / "test.csv")
    parser.add_argument("--base", type=Path, help="task data that the model answers well by itself")
    parser.add_argument("--base-train", type=Path, help="others like them, for the gate")
    parser.add_argument("--columns", default="prompt=ticket,answer=team")
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--rates", type=float, nargs="+", default=RATES, help="of LoRA, chosen by validation")
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS, help="of a question's prompt, in tokens")
    parser.add_argument("--rounds", type=int, default=6, help="requests of each way and length")
    parser.add_argument("--serve-args", nargs=argparse.REMAINDER, default=[], help="flags for both servers, last")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
