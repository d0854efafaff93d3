"""The command: see the package."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

from benchmarks.research.continual import footprint_table, search
from benchmarks.research.continual.answering.http import EndpointFailed
from benchmarks.research.continual.presets import preset_arguments
from benchmarks.research.continual.report import command as report
from benchmarks.research.continual.run import ALL_METHODS, HTTP, OFFLINE, add_stream_options, run
from benchmarks.research.continual.suites import load_suite
from benchmarks.server_process import ServerFailed
from inducekv_vllm.errors import ConfigError, InduceKVError

PROGRAM = "python -m benchmarks.research.continual"
NOT_PRESET = {"preset", "out", "serve_args", "command"}
GO_ON = "run it again with the same arguments to go on"


def main(arguments: Sequence[str] | None = None) -> int:
    try:
        options = parse(sys.argv[1:] if arguments is None else arguments)
        return options.command(options)
    except InduceKVError as error:
        print(f"{PROGRAM}: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except (EndpointFailed, ServerFailed, BrokenProcessPool) as error:  # the last: a stream's process was killed
        print(f"{PROGRAM}: error: {error}\n{GO_ON}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"{PROGRAM}: interrupted; {GO_ON}", file=sys.stderr)
        return 130


def run_and_report(options: argparse.Namespace) -> int:
    """Writes the report into OUT if any stream is finished. Raises ConfigError: a stream did not end."""
    outcome = run(options)
    if outcome.finished:
        from benchmarks.research.continual.report.content import record_command

        record_command(options.out, [*PROGRAM.split(), *options.given])
        report.write_report(options.out)
    if outcome.refused:
        raise ConfigError(
            f"{len(outcome.refused)} of {outcome.total} streams did not end: {'; '.join(outcome.refused)}"
        )
    return 0


def write_data(options: argparse.Namespace) -> int:
    load_suite(options.suite, options.out)
    print(options.out)
    return 0


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The options, a preset under the user's own; `given` are the arguments. Raises ConfigError: no method is named."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.command is not run_and_report:
        return options
    if options.preset:
        preset = preset_arguments(options.preset, set(vars(options)) - NOT_PRESET)
        options = parser.parse_args([arguments[0], *preset, *arguments[1:]])  # of two, the later one counts
    if not options.method:
        raise ConfigError(f"--method must name the methods to run, or {ALL_METHODS!r}")
    options.given = list(arguments)
    return options


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=PROGRAM, description="Continual-learning benchmark.")
    commands = parser.add_subparsers(required=True)
    parser_of_run = commands.add_parser("run", help="run methods over a stream, or go on with a run that was killed")
    parser_of_run.set_defaults(command=run_and_report)
    add = parser_of_run.add_argument
    add("--preset", metavar="FILE|NAME", help="options from a TOML file; full and smoke come with the benchmark")
    add("--full", dest="preset", action="store_const", const="full", help="the whole demo stream for all methods")
    add("--smoke", dest="preset", action="store_const", const="smoke", help="the shortest way through everything")
    add_stream_options(parser_of_run)
    add(
        "--method",
        nargs="+",
        metavar="NAME",
        help=f"methods of benchmarks/research/continual/methods, or {ALL_METHODS}",
    )
    add("--budget", nargs="+", type=int, default=[32], help="entries of memory; other methods get their bytes")
    add("--results", type=Path, metavar="FILE", help="write everything but the predictions into one JSON file")
    add("--split", choices=("test", "validation"), default="test", help="what is asked; validation to choose settings")
    add("--test-limit", type=int, default=256, help="questions of each task (default 256)")
    add("--base-limit", type=int, default=270, help="base questions (default 270)")
    add("--answer", choices=(HTTP, OFFLINE), default=HTTP, help="ask a server (default), or transformers in-process")
    add("--keep-states", choices=("last", "all", "none"), default="last", help="of what the tasks of a stream left")
    add("--serve-args", nargs=argparse.REMAINDER, default=[], help="flags for the run's own servers, last of all")
    data = commands.add_parser("data", help="write a suite's questions and pictures, as task data")
    data.set_defaults(command=write_data)
    data.add_argument("--suite", required=True)
    data.add_argument("--out", type=Path, required=True)
    for module in (report, search, footprint_table):
        module.add_parser(commands)
    return parser


if __name__ == "__main__":
    sys.exit(main())
