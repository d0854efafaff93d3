"""`inducekv-bundle publish`: one bundle for several servers, and which version each of them serves."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from inducekv_vllm.bundle import read_bundle

from ..client import Server, ServerError
from .servers import require_address

SUCCESS, DIFFERENT = 0, 1
NOTHING = "-"
Command = Callable[[argparse.Namespace], int]


def publish(options: argparse.Namespace) -> int:
    """Load a bundle into several servers, one after the other, and print which version each serves.

    A server that refuses or cannot be reached does not keep the others from it. Exit status 1: some servers, which the
    last line names, do not serve this version now; run the command again.
    """
    for url in options.to:
        require_address(url, "--to")
    digest = read_bundle(options.path).digest  # a bundle that no server would take goes to none
    name = options.name or options.path.stem
    behind = [url for url in options.to if not _published(url, name, digest, options)]
    if behind:
        print(f"{len(behind)} of {len(options.to)} servers do not serve {digest}: {', '.join(behind)}", file=sys.stderr)
    return DIFFERENT if behind else SUCCESS


def _published(url: str, name: str, digest: str, options: argparse.Namespace) -> bool:
    """Load the bundle into one server, unless it serves it or is only asked; print what it serves before and after."""
    server = Server.from_environment(url)
    try:
        before = after = server.digest(name)
        if before != digest and not options.check:
            _try_to_load(server, name, options)
            after = server.digest(name)
    except ServerError as error:
        print(f"{url}: what it serves is unknown: {error}", file=sys.stderr)
        return False
    print(f"{url}: {name} was {before or NOTHING}, is {after or NOTHING}")
    return after == digest


def _try_to_load(server: Server, name: str, options: argparse.Namespace) -> None:
    """Print why it fails. It may be done all the same, if it is the answer that does not arrive."""
    try:
        server.load(name, options.path.resolve(), expected_digest=options.expected_digest)
    except ServerError as error:
        print(f"{server.url}: {error}", file=sys.stderr)


def add_command(command: Callable[[str, Command], argparse.ArgumentParser]) -> None:
    """Add this command to the parser of `inducekv-bundle`."""
    added = command("publish", publish)
    added.add_argument("path", metavar="PATH", type=Path, help="a bundle file, which every server finds at this path")
    added.add_argument(
        "--to", metavar="URL", action="append", required=True, help="a server, http://127.0.0.1:8000; repeatable"
    )
    added.add_argument("--name", help="what requests ask for (default: the file's name without its ending)")
    added.add_argument("--expected-digest", metavar="D", help="only where the name stands for this version")
    added.add_argument("--check", action="store_true", help="change nothing; only say which version each serves")
