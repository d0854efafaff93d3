"""Everyday requests and phrases: what the relevance gate learns as not being a task's own question."""

import random
import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from inducekv_vllm.backbone.turns import message
from inducekv_vllm.bundle.source import source_digest_of
from inducekv_vllm.errors import TaskDataError

from ..data.encoding import read_text
from ..data.examples import Example, read_task
from ..data.turns import require_text

FOLDER = Path(__file__).parent
FILLINGS = 5
SLOT = re.compile(r"\{(\w+)\}")


@dataclass(frozen=True)
class Request:
    text: str
    kind: str
    language: str
    picture: bool


@dataclass(frozen=True)
class Phrases:
    """What varies a task's own questions while the gate is fitted."""

    wrappers: tuple[str, ...]
    systems: tuple[str, ...]
    sentences: tuple[str, ...]
    turns: tuple[tuple[str, str], ...]


@cache
def everyday_requests() -> tuple[Request, ...]:
    """Return all everyday requests in a fixed order; every prefix mixes kinds and languages."""
    requests: dict[str, Request] = {}
    for path in sorted((FOLDER / "background").glob("*.toml")):
        for request in _requests(path.stem, tomllib.loads(path.read_text(encoding="utf-8"))):
            requests.setdefault(request.text.casefold(), request)
    mixed = list(requests.values())
    random.Random("background").shuffle(mixed)
    return tuple(mixed)


def read_background(path: str | Path) -> list[Example]:
    """The user's own requests: a .txt file with one request a line, or task data in any format.

    Raises:
        TaskDataError: the file cannot be read, is of another format or holds no requests.
    """
    source = Path(path)
    if source.suffix != ".txt":
        return read_task(source)
    lines = (line.strip() for line in read_text(source, "the background requests").splitlines())
    texts = list(dict.fromkeys(line for line in lines if line))
    if not texts:
        raise TaskDataError(f"{source}: the file holds no requests")
    for number, request in enumerate(texts, start=1):
        require_text(request, f"request {number}", "text alone", str(source))
    return [_example(number, request) for number, request in enumerate(texts)]


@cache
def phrases() -> Phrases:
    data = tomllib.loads((FOLDER / "phrases.toml").read_text(encoding="utf-8"))
    return Phrases(
        wrappers=tuple(data["wrappers"]),
        systems=tuple(data["systems"]),
        sentences=tuple(data["sentences"]),
        turns=tuple((turn["user"], turn["assistant"]) for turn in data["turns"]),
    )


def _example(number: int, text: str) -> Example:
    messages = (message("user", text),)
    return Example(f"background/{number}", "background", messages, (), "", source_digest_of(messages, []))


def _requests(language: str, data: dict[str, Any]) -> Iterator[Request]:
    for kind in data["kind"]:
        for template in kind["templates"]:
            for text in _fillings(f"{language} {template}", template, data["slots"]):
                yield Request(text, kind["name"], language, kind["picture"])


def _fillings(seed: str, template: str, slots: dict[str, list[str]]) -> list[str]:
    """Fill a template's slots several times; a template without slots stands for itself."""
    names = SLOT.findall(template)
    if not names:
        return [template]
    # A seed of each template's own keeps its fillings when other templates come or go.
    rng = random.Random(seed)
    columns = {name: rng.sample(slots[name], len(slots[name])) for name in names}
    texts = []
    for row in range(FILLINGS):
        chosen = {name: column[row % len(column)] for name, column in columns.items()}
        text = template.format_map(chosen)
        texts.append(text[:1].upper() + text[1:] if template.startswith("{") and rng.random() < 0.5 else text)
    return texts
