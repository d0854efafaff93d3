"""What answering about a document costs when it is served, and what that leaves of other requests.

    python -m benchmarks.document.serving --document pump --work DIR --output FILE

One server has the memory of a quarter twice: behind a gate, and without one, where the name alone chooses it. In turns,
and relative to the untouched model of the same server:

- the time to the first token of one request, and requests a second while 16 are there. No prompt is in the prefix
  cache, but for the document's where a row says so;
- the share of 48 requests that have nothing to do with the document (`others.txt`) whose answer stays the same.
"""

from __future__ import annotations

import argparse
import asyncio
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any, Final

import selector
from benchmarks.chat import chat_body
from benchmarks.document.__main__ import PROMPT, RETRIEVED, Compared, document_parser
from benchmarks.real.model import model_folder
from benchmarks.record import keep
from benchmarks.server_process import serving
from benchmarks.serving.client import ask_together, session
from inducekv_vllm.backbone.turns import message
from inducekv_vllm.bundle import read_bundle, write_bundle
from selector.backbone.model import Backbone
from selector.cli.asking import served_answers, served_decisions
from selector.data.examples import Example
from selector.data.given import read
from selector.gate.background import read_background

SHARE: Final = 4
OTHERS: Final = Path(__file__).parent / "others.txt"
UNTOUCHED, GATED, NAMED = "nothing", "memory behind a gate", "memory by its name"
CACHED: Final = "document in the prompt, cached"
BASE: Final = "base"
AT_ONCE: Final = 16
FIRST, ANSWERED, TOLD = 2, 32, 24  # tokens that are asked for: of a first token, a crowd, another request
SPARE: Final = 512  # tokens of a request beside the document
ENVIRONMENT: Final = {"VLLM_CPU_KVCACHE_SPACE": "2"}


@dataclass(frozen=True)
class Way:
    """How a question about the document is asked."""

    model: str
    put: Callable[[str], str]  # the question, or the question behind a text
    cached: bool = False  # what all its prompts begin with


def main(arguments: Sequence[str] | None = None) -> None:
    parser = document_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="first tokens of each way (%(default)s)")
    parser.add_argument("--crowds", type=int, default=3, help=f"of {AT_ONCE} requests, of each way (%(default)s)")
    options = parser.parse_args(arguments)
    compared = Compared(options)
    result = {"document": options.document, "model": Path(options.model).name, "tokens": compared.text.tokens}
    keep(result | measured(compared, options), options.output)


def measured(compared: Compared, options: argparse.Namespace) -> dict[str, Any]:
    """By way."""
    text = compared.document.text.strip()
    ways = {
        UNTOUCHED: Way(BASE, str),
        NAMED: Way("named", str),
        GATED: Way("gated", str),
        RETRIEVED: Way(BASE, compared.retrieved()),
        CACHED: Way(BASE, lambda asked: f"{text}\n\n{asked}", cached=True),
        PROMPT: Way(BASE, lambda asked: f"{text}\n\n{asked}"),
    }
    paths = _bundles(compared, options)
    memories = [argument for name, path in paths.items() for argument in ("--memory", f"{name}={path}")]
    flags = ["--served-model-name", BASE, "--dtype", options.dtype, "--max-num-seqs", str(AT_ONCE), *memories]
    flags += ["--max-model-len", str(compared.text.tokens + SPARE)]
    compared.__dict__.pop("backbone")  # its room is the server's
    with (
        serving([str(model_folder(options.model)), *flags], options.work / "server.log", ENVIRONMENT) as url,
        _load() as load,
    ):
        asked = [each.question for each in compared.asked]
        rows = _of_server(url, ways, asked, options.rounds, options.crowds)
    return {"rows": rows, "load": load}


def _of_server(
    url: str, ways: Mapping[str, Way], asked: Sequence[str], rounds: int, crowds: int
) -> dict[str, dict[str, Any]]:
    first = asyncio.run(_first_tokens(url, ways, asked, rounds))
    crowd = asyncio.run(_crowds(url, {name: way for name, way in ways.items() if _in_a_crowd(name)}, asked, crowds))
    others = read_background(OTHERS)
    plain = [answer.text for answer in served_answers(url, BASE, others, TOLD)]
    rows: dict[str, dict[str, Any]] = {}
    for name, way in ways.items():
        row: dict[str, Any] = {"first_token_s": median(first[name]), "first_token": _ratio(first, name)}
        if name in crowd:
            row |= {"requests_per_s": AT_ONCE / median(crowd[name]), "requests": 1 / _ratio(crowd, name)}
        if name != PROMPT:  # the same answers as of the cached one
            said = [answer.text for answer in served_answers(url, way.model, _put(way, others), TOLD)]
            row["others_unchanged"] = sum(map(str.__eq__, said, plain)) / len(others)
        if name == GATED:
            for group, questions in (("others", others), ("own", read([{"prompt": q, "answer": "-"} for q in asked]))):
                opened = [decided.task is not None for decided in served_decisions(url, way.model, questions)]
                row[f"{group}_opened"] = sum(opened) / len(opened)
        rows[name] = row
    return rows


def _in_a_crowd(name: str) -> bool:
    """16 prompts with the whole document would be minutes of prefill: its first token says what that is."""
    return name != PROMPT


def _ratio(seconds: Mapping[str, Sequence[float]], name: str) -> float:
    """To the untouched model's in the same turn: the machine is not equally quiet in all."""
    return median(own / plain for own, plain in zip(seconds[name], seconds[UNTOUCHED], strict=True))


async def _first_tokens(url: str, ways: Mapping[str, Way], asked: Sequence[str], rounds: int) -> dict[str, list[float]]:
    """Seconds of each turn, in which each way is asked; the first turn warms up."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    salts = count()
    async with session() as client:
        for number in range(rounds + 1):
            for name, way in ways.items():
                body = _body(way, asked[number % len(asked)], FIRST, salts)
                _, timings, failed = await ask_together(client, url, [body], 1)
                assert not failed, failed
                if number:
                    seconds[name].append(timings[0].ttft)
    return seconds


async def _crowds(url: str, ways: Mapping[str, Way], asked: Sequence[str], crowds: int) -> dict[str, list[float]]:
    """Seconds that `AT_ONCE` requests take, of each turn."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    salts = count(10**6)
    async with session() as client:
        for _ in range(crowds):
            for name, way in ways.items():
                bodies = [_body(way, asked[at % len(asked)], ANSWERED, salts) for at in range(AT_ONCE)]
                taken, _, failed = await ask_together(client, url, bodies, AT_ONCE)
                assert not failed, failed
                seconds[name].append(taken)
    return seconds


def _body(way: Way, asked: str, tokens: int, salts: Iterator[int]) -> dict[str, Any]:
    """A salt of its own keeps a request from what others have left in the prefix cache."""
    salt = "all" if way.cached else f"own {next(salts)}"
    return {"body": chat_body(way.model, [message("user", way.put(asked))], tokens, {}) | {"cache_salt": salt}}


def _put(way: Way, others: Sequence[Example]) -> list[Example]:
    texts = [str(each.messages[0]["content"][0]["text"]) for each in others]
    return read([{"prompt": way.put(text), "answer": "-"} for text in texts])


def _bundles(compared: Compared, options: argparse.Namespace) -> dict[str, Path]:
    """The document's memory behind a gate, as `inducekv-select` makes it, and without; they are made once."""
    paths = {name: options.work / f"{options.document}-{name}.safetensors" for name in ("gated", "named")}
    if not paths["gated"].exists():
        backbone = Backbone.load(model_folder(options.model))
        selector.teach_document(backbone, compared.document, share=SHARE, output=paths["gated"], progress=True)
    if not paths["named"].exists():
        write_bundle(read_bundle(paths["gated"]).next(gate=None), paths["named"])
    return paths


@contextmanager
def _load() -> Iterator[list[float]]:
    """The load average of a minute, before and after."""
    load = [os.getloadavg()[0]]
    yield load
    load.append(os.getloadavg()[0])


if __name__ == "__main__":
    main()
