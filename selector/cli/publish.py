"""Bundles for running servers. `inducekv-bundle publish` loads one into several, and says what each of them serves."""

import argparse
import sys
import urllib.parse
from pathlib import Path
from typing import Final

from inducekv_vllm.bundle import read_bundle
from inducekv_vllm.errors import ConfigError

from ..client import Server, ServerError
from .common import DIFFERENT, SUCCESS

NOTHING: Final = "-"


def run(options: argparse.Namespace) -> int:
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


def load_finished(url: str, path: Path) -> None:
    """Load the finished bundle into a running server, under the file's name without its ending.

    Raises:
        ConfigError: the server cannot be reached or refuses; the bundle stays on disk.
    """
    try:
        card = Server.from_environment(url).load(path.stem, path.resolve())
    except ServerError as error:
        raise ConfigError(f"{path} was written, but {error}; inducekv-bundle publish loads it") from error
    print(f"published as {card['name']} at {url}")


def require_address(url: str, flag: str = "--publish") -> None:
    """Raises ConfigError: it is not the address of a server."""
    if not url.startswith(("http://", "https://")):
        guess = "" if "://" in url else f"; did you mean http://{url}?"
        raise ConfigError(f"{flag} must be an http or https address, found {url!r}{guess}")
    try:
        parts = urllib.parse.urlsplit(url)
        is_address = bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_address = False
    if not is_address:
        raise ConfigError(f"{flag} must be an address such as http://127.0.0.1:8000, found {url!r}")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    text = "a bundle file, which every server finds at this path"
    parser.add_argument("path", metavar="BUNDLE", type=Path, help=text)
    text = "a server, http://127.0.0.1:8000; repeatable"
    parser.add_argument("--to", metavar="URL", action="append", required=True, help=text)
    parser.add_argument("--name", help="what requests ask for (default: the file's name without its ending)")
    parser.add_argument("--expected-digest", metavar="D", help="only where the name stands for this version")
    parser.add_argument("--check", action="store_true", help="change nothing; only say which version each serves")
