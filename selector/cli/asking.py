"""What a running server answers to questions, and what its gate decides on them."""

from __future__ import annotations

import argparse
import base64
import mimetypes
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from inducekv_vllm.errors import ConfigError

from .publishing import ask, require_address, served_digest

if TYPE_CHECKING:
    from ..data.examples import Example

AT_ONCE: Final = 16  # requests under way
TRACE: Final = {"inducekv_trace": 1}


def add_asked(parser: argparse.ArgumentParser, verb: str, questions: str) -> None:
    """The arguments of a command that asks about a bundle: the questions, and a model here or a server that answers."""
    parser.add_argument("path", metavar="BUNDLE", type=Path, help="a bundle file")
    parser.add_argument(
        "--questions", type=Path, action="append", required=True, metavar="FILE", help=f"{questions}; repeatable"
    )
    asked = parser.add_mutually_exclusive_group(required=True)
    asked.add_argument("--model", help=f"{verb} here, with this model folder or Hugging Face id")
    asked.add_argument("--url", help="ask the server at this address, which has the bundle")
    parser.add_argument("--name", help="with --url: the bundle's name there (default: the file's without its ending)")
    parser.add_argument("--device", default="cpu", help="with --model: torch device (default cpu)")


def check_asked(options: argparse.Namespace) -> None:
    """Raises ConfigError: the flags of `add_asked` contradict each other, or name no server."""
    if options.url:
        require_address(options.url, "--url")
    elif options.name:
        raise ConfigError("--name is what the bundle is called at a server: give its --url")


def require_served(url: str, name: str, digest: str) -> None:
    """Raises ConfigError: the server cannot be reached, or `name` does not stand for the bundle of this digest."""
    found = served_digest(url, name)
    if found is None:
        raise ConfigError(f"{url} has no bundle of the name {name!r}: give the name that it has there by --name")
    if found != digest:
        raise ConfigError(f"{url} serves another version as {name!r}, {found}; the bundle's digest is {digest}")


def served_decisions(url: str, name: str, examples: Sequence[Example]) -> list[tuple[str | None, str | None]]:
    """The task that each question is sent to, or None and why the gate stays closed.

    Raises:
        ConfigError: the server cannot be reached or refuses, or its answer does not say what the gate has decided.
    """
    with ThreadPoolExecutor(AT_ONCE) as workers:
        return list(workers.map(lambda example: _decision(url, name, example), examples))


def _decision(url: str, name: str, example: Example) -> tuple[str | None, str | None]:
    body = {"model": name, "messages": _messages(example), "max_tokens": 1, "temperature": 0, "vllm_xargs": TRACE}
    answer: Any = ask(url, "chat/completions", body, is_change=False)
    try:
        gate = answer["kv_transfer_params"]["inducekv"]["gate"]
        task, closed = gate["task"], gate["closed"]
    except (KeyError, TypeError) as error:
        raise ConfigError(f"the answer of {url} to {example.id!r} has no trace of the gate") from error
    return task, closed


def base_model(url: str, name: str) -> str:
    """What the untouched model is called at a server that has a bundle of this name.

    Raises:
        ConfigError: the server cannot be reached, or does not say it.
    """
    cards = ask(url, "models")["data"]
    parent = next((card.get("parent") for card in cards if card["id"] == name), None)
    if not isinstance(parent, str):
        raise ConfigError(f"{url} does not say of which model {name!r} is a bundle")
    return parent


def served_answers(url: str, model: str, examples: Sequence[Example], max_tokens: int) -> list[str]:
    """Greedy answers. Raises ConfigError: the server cannot be reached or refuses."""

    def answer(example: Example) -> str:
        body = {"model": model, "messages": _messages(example), "max_tokens": max_tokens, "temperature": 0}
        found: Any = ask(url, "chat/completions", body, is_change=False)
        return str(found["choices"][0]["message"]["content"] or "")

    with ThreadPoolExecutor(AT_ONCE) as workers:
        return list(workers.map(answer, examples))


def _messages(example: Example) -> list[dict[str, Any]]:
    """The question as a client sends it: pictures inside the request."""
    paths = iter(example.images)

    def sent(part: dict[str, Any]) -> dict[str, Any]:
        if part["type"] != "image":
            return part
        path = next(paths)
        kind = mimetypes.guess_type(path.name)[0] or "image/png"
        data = base64.b64encode(path.read_bytes()).decode()
        return {"type": "image_url", "image_url": {"url": f"data:{kind};base64,{data}"}}

    return [{**message, "content": [sent(part) for part in message["content"]]} for message in example.messages]
