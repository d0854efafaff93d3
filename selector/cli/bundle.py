"""`inducekv-bundle`: inspect, verify, evaluate, teach, shorten, import, sign and publish bundles, fit their gates, and
check audit chains.

Exit status: 0 for success, 1 if `publish` finds a server that serves another version, 2 for an error, printed in one
line on standard error.
"""

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Final, NamedTuple

from inducekv_vllm.errors import InduceKVError

from .flags import Parser, error_line

PROGRAM: Final = "inducekv-bundle"
FAILED: Final = 2


class Subcommand(NamedTuple):
    module: str  # of this package, with `add_arguments` and `run`
    text: str


SUBCOMMANDS: Final = {
    "inspect": Subcommand("inspect", "show what a bundle holds"),
    "verify": Subcommand("verify", "check a bundle, its model and who has signed it"),
    "eval": Subcommand("evaluate", "count right answers with a bundle and without, and what its gate decides"),
    "teach": Subcommand("teach", "add facts to a bundle, or make one of facts alone"),
    "forget": Subcommand("forget", "leave out entries, facts and tasks"),
    "gate-fit": Subcommand("gate_fit", "fit a bundle's gate: its first one, or again"),
    "import": Subcommand("imported", "make a bundle of a memory from elsewhere, or of a text"),
    "route": Subcommand("route", "put a gate in front of LoRA adapters"),
    "sign": Subcommand("sign", "sign a bundle"),
    "publish": Subcommand("publish", "load a bundle into several servers"),
    "audit": Subcommand("audit", "check the audit chain of a server"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    given = sys.argv[1:] if arguments is None else arguments
    try:
        options = _parser(given[:1]).parse_args(given)

        from .warned import warnings_as_lines

        with warnings_as_lines(PROGRAM):
            status: int = options.run(options)
    except InduceKVError as error:
        print(error_line(PROGRAM, error), file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        print(f"{PROGRAM}: interrupted, nothing was written", file=sys.stderr)
        return FAILED
    return status


def _parser(asked: Sequence[str]) -> argparse.ArgumentParser:
    """With the arguments of the subcommand that is asked for; a module of the others would take seconds to import."""
    parser = Parser(prog=PROGRAM, description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, subcommand in SUBCOMMANDS.items():
        added = commands.add_parser(name, help=subcommand.text)
        if name in asked:
            module = import_module(f"{__package__}.{subcommand.module}")
            added.description = module.run.__doc__
            added.set_defaults(run=module.run)
            module.add_arguments(added)
    return parser


if __name__ == "__main__":
    sys.exit(main())
