"""Hand a finished bundle to running servers."""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any, Final

from inducekv_vllm.errors import ConfigError
from inducekv_vllm.host.config import ADMIN_HEADER, ADMIN_KEY_VARIABLE

API_KEY_VARIABLE: Final = "INDUCEKV_API_KEY"


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """The keys are for the server that was named."""

    def redirect_request(self, *_: Any) -> None:
        """Let the answer be an error."""


_OPENER: Final = urllib.request.build_opener(_NoRedirects)


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
        card = load(url, path.stem, path)
    except ConfigError as error:
        raise ConfigError(f"{path} was written, but {error}") from error
    print(f"published as {card['name']} at {url}")


def load(url: str, name: str, path: Path, expected_digest: str | None = None) -> dict[str, Any]:
    """Let `name` stand for a bundle file that the server can read; return what the server says of it.

    Raises:
        ConfigError: the server cannot be reached or refuses.
    """
    body: dict[str, Any] = {"name": name, "path": str(path.resolve()), "replace": True}
    if expected_digest is not None:
        body["expected_digest"] = expected_digest
    return ask(url, "load_memory_bundle", body)


def served_digest(url: str, name: str) -> str | None:
    """What `name` stands for on a server; None for nothing.

    Raises:
        ConfigError: the server cannot be reached or refuses.
    """
    cards = ask(url, "memory_bundles")["data"]
    return next((str(card["digest"]) for card in cards if card["name"] == name), None)


def ask(url: str, route: str, body: dict[str, Any] | None = None, *, is_change: bool = True) -> dict[str, Any]:
    """POST a body to one of a server's routes, or GET it without one.

    The server's admin key is read from the variable `ADMIN_KEY_VARIABLE`, and its API key, if it has one, from
    `API_KEY_VARIABLE`. A POST that changes nothing goes without the admin key.

    Raises:
        ConfigError: the server cannot be reached or refuses.
    """
    headers = {"Content-Type": "application/json"}
    if key := os.environ.get(API_KEY_VARIABLE):
        headers["Authorization"] = f"Bearer {key}"
    if body is not None and is_change and (key := os.environ.get(ADMIN_KEY_VARIABLE)):
        headers[ADMIN_HEADER] = key
    address = f"{url.rstrip('/')}/v1/{route}"
    data = None if body is None else json.dumps(body).encode()
    try:
        request = urllib.request.Request(address, data=data, headers=headers)
        with _OPENER.open(request, timeout=600) as answer:
            found: dict[str, Any] = json.loads(answer.read())
            return found
    except urllib.error.HTTPError as error:
        reason = error.read(2000).decode(errors="replace")
        raise ConfigError(f"{address} refused it ({error.code}): {reason}") from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"{address} cannot be reached: {error}") from error
