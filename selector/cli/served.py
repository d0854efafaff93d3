"""`inducekv-bundle list`, `rollback` and `unload`: what a running server has loaded, and changes of it."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any, Final

from rich.table import Table

from .gate_tables import print_table
from .publishing import ask, require_address

SUCCESS: Final = 0
Command = Callable[[argparse.Namespace], int]


def list_bundles(options: argparse.Namespace) -> int:
    """Print what a server has loaded: names, tasks, versions, and how many requests use them."""
    require_address(options.url, "--url")
    table = Table("name", "digest", "entries", "facts", "tasks", "earlier versions", "requests", box=None)
    for card in ask(options.url, "memory_bundles")["data"]:
        tasks, earlier = ", ".join(card["tasks"]), len(card["versions"]) - 1
        cells = (card["entries"], card["facts"], tasks or "-", earlier, card["active_requests"])
        table.add_row(card["name"], card["digest"], *map(str, cells))
    print_table(table)
    return SUCCESS


def rollback(options: argparse.Namespace) -> int:
    """Let a name of a server stand for the version before, or for the kept one that --digest names."""
    require_address(options.url, "--url")
    card = ask(options.url, "rollback_memory_bundle", _body(options, digest=options.digest))
    print(f"{options.url}: {card['name']} is {card['digest']}")
    return SUCCESS


def unload(options: argparse.Namespace) -> int:
    """Let a name of a server stand for nothing; running requests end with the memory that they have."""
    require_address(options.url, "--url")
    ask(options.url, "unload_memory_bundle", _body(options))
    print(f"{options.url}: {options.name} is unloaded")
    return SUCCESS


def _body(options: argparse.Namespace, **more: str | None) -> dict[str, Any]:
    given = {"expected_digest": options.expected_digest, **more}
    return {"name": options.name, **{name: value for name, value in given.items() if value is not None}}


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
