"""Addresses of running servers, and a finished bundle for one of them."""

from __future__ import annotations

import urllib.parse
from pathlib import Path

from inducekv_vllm.errors import ConfigError

from ..client import Server, ServerError


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


def publish(url: str, path: Path) -> None:
    """Load the finished bundle into a running server, under the file's name without its ending.

    Raises:
        ConfigError: the server cannot be reached or refuses; the bundle stays on disk.
    """
    try:
        card = Server.from_environment(url).load(path.stem, path.resolve())
    except ServerError as error:
        raise ConfigError(f"{path} was written, but {error}") from error
    print(f"published as {card['name']} at {url}")
