"""`inducekv-bundle list`, `rollback` and `unload`: what a running server has loaded, and changes of it."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Final

from rich.table import Table

from ..client import Server
from .gate_tables import print_table
from .servers import require_address

SUCCESS: Final = 0
Command = Callable[[argparse.Namespace], int]


def list_bundles(options: argparse.Namespace) -> int:
    """Print what a server has loaded: names, tasks, versions, and how many requests use them."""
    require_address(options.url, "--url")
    table = Table("name", "digest", "entries", "facts", "tasks", "earlier versions", "requests", box=None)
    for card in Server.from_environment(options.url).bundles():
        tasks, earlier = ", ".join(card["tasks"]), len(card["versions"]) - 1
        cells = (card["entries"], card["facts"], tasks or "-", earlier, card["active_requests"])
        table.add_row(card["name"], card["digest"], *map(str, cells))
    print_table(table)
    return SUCCESS


def rollback(options: argparse.Namespace) -> int:
    """Let a name of a server stand for the version before, or for the kept one that --digest names."""
    require_address(options.url, "--url")
    server = Server.from_environment(options.url)
    card = server.rollback(options.name, digest=options.digest, expected_digest=options.expected_digest)
    print(f"{options.url}: {card['name']} is {card['digest']}")
    return SUCCESS


def unload(options: argparse.Namespace) -> int:
    """Let a name of a server stand for nothing; running requests end with the memory that they have."""
    require_address(options.url, "--url")
    Server.from_environment(options.url).unload(options.name, expected_digest=options.expected_digest)
    print(f"{options.url}: {options.name} is unloaded")
    return SUCCESS


def add_commands(command: Callable[[str, Command], argparse.ArgumentParser]) -> None:
    """Add these commands to the parser of `inducekv-bundle`."""
    for name, run in (("list", list_bundles), ("rollback", rollback), ("unload", unload)):
        added = command(name, run)
        if name != "list":
            added.add_argument("name", metavar="NAME", help="what requests ask for")
            added.add_argument("--expected-digest", metavar="D", help="only where the name stands for this version")
        if name == "rollback":
            added.add_argument("--digest", metavar="D", help="the version to go back to (default: the one before)")
        added.add_argument("--url", required=True, help="the server's address, http://127.0.0.1:8000")
