"""Hand a finished bundle to a running server."""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Final

from inducekv_vllm.config import ADMIN_HEADER, ADMIN_KEY_VARIABLE
from inducekv_vllm.errors import ConfigError

API_KEY_VARIABLE: Final = "INDUCEKV_API_KEY"


def require_address(url: str) -> None:
    """Raises ConfigError: it is not the address of a server."""
    if not url.startswith(("http://", "https://")):
        guess = "" if "://" in url else f"; did you mean http://{url}?"
        raise ConfigError(f"--publish must be an http or https address, found {url!r}{guess}")
    try:
        parts = urllib.parse.urlsplit(url)
        is_address = bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_address = False
    if not is_address:
        raise ConfigError(f"--publish must be an address such as http://127.0.0.1:8000, found {url!r}")


def publish(url: str, path: Path) -> None:
    """Load the finished bundle into a running server, under the file's name without its ending.

    The server's admin key is read from the variable `ADMIN_KEY_VARIABLE`, and its API key, if it has one, from
    `API_KEY_VARIABLE`.

    Raises:
        ConfigError: the server cannot be reached or refuses; the bundle stays on disk.
    """
    body = json.dumps({"name": path.stem, "path": str(path.resolve()), "replace": True}).encode()
    headers = {"Content-Type": "application/json"}
    if key := os.environ.get(API_KEY_VARIABLE):
        headers["Authorization"] = f"Bearer {key}"
    if key := os.environ.get(ADMIN_KEY_VARIABLE):
        headers[ADMIN_HEADER] = key
    address = f"{url.rstrip('/')}/v1/load_memory_bundle"
    try:
        request = urllib.request.Request(address, data=body, headers=headers, method="POST")
        with urllib.request.urlopen(request, timeout=600) as answer:
            card = json.loads(answer.read())
    except urllib.error.HTTPError as error:
        reason = error.read(2000).decode(errors="replace")
        raise ConfigError(f"{path} was written, but {address} refused it ({error.code}): {reason}") from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} was written, but {address} cannot be reached: {error}") from error
    print(f"published as {card['name']} at {url}")
