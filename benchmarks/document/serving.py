"""What answering about a document costs when it is served, and what that leaves of other requests.

    python -m benchmarks.document.serving --document reference --work DIR --steps 200 --output FILE

It serves the memory of a sixteenth and the LoRA that `python -m benchmarks.document` has left in DIR for as many steps:
the memory behind a gate, which is fitted here once, on a server with InduceKV; LoRA on one with --enable-lora. In one
run, in turns, and relative to the untouched model of the same server:

- the time to the first token of one request, and requests a second while 16 are there. No prompt is in the prefix
  cache, but for the document's where a row says so;
- the share of 48 requests that have nothing to do with the document (`others.txt`) whose answer stays the same.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any, Final

from benchmarks.chat import chat_body, messages_of
from benchmarks.document.__main__ import Compared, document_parser
from benchmarks.document.asked import beside
from benchmarks.document.documents import DOCUMENTS
from benchmarks.document.retrieval import retriever
from benchmarks.lora_adapter import served_rank
from benchmarks.real.model import model_folder
from benchmarks.record import keep
from benchmarks.server_process import serving
from benchmarks.serving.client import ask_together, session
from inducekv_vllm.bundle import write_bundle
from selector.cli.asking import served_answers, served_decisions
from selector.data.examples import Example
from selector.document.update import bundle_of, gate_of
from selector.gate.background import read_background
from selector.update.inputs import TaskInputs

SHARE: Final = 16
OTHERS: Final = Path(__file__).parent / "others.txt"
UNTOUCHED, MEMORY, LORA = "nothing", "memory", "LoRA"
CACHED: Final = "document in the prompt, cached"
BASE, NAME, ADAPTER = "base", "document", "adapter"  # names of models
AT_ONCE: Final = 16
FIRST, ANSWERED, TOLD = 2, 32, 24  # tokens that are asked for: of a first token, a crowd, another request
SPARE: Final = 512  # tokens of a request beside the document
ENVIRONMENT: Final = {"VLLM_CPU_KVCACHE_SPACE": "3"}


@dataclass(frozen=True)
class Way:
    """How a question about the document is asked."""

    model: str
    put: Callable[[Example], Example]  # the question, or the question behind a text
    cached: bool = False  # what all its prompts begin with


def main(arguments: Sequence[str] | None = None) -> None:
    parser = document_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="first tokens of each way (%(default)s)")
    parser.add_argument("--crowds", type=int, default=3, help=f"of {AT_ONCE} requests, of each way (%(default)s)")
    options = parser.parse_args(arguments)
    compared = Compared(options, DOCUMENTS[options.document]())
    result = {"document": options.document, "tokens": len(compared.token_ids), "steps": options.steps}
    keep(result | {"servers": measured(compared, options)}, options.output)


def measured(compared: Compared, options: argparse.Namespace) -> dict[str, Any]:
    """By server, and there by way."""
    text, find = compared.document.text, retriever(compared.pieces)
    ways = {
        UNTOUCHED: Way(BASE, _as_it_is),
        MEMORY: Way(NAME, _as_it_is),
        "retrieved pieces": Way(BASE, lambda asked: beside(find(_text(asked)), asked)),
        CACHED: Way(BASE, lambda asked: beside(text, asked), cached=True),
        "document in the prompt": Way(BASE, lambda asked: beside(text, asked)),
    }
    adapted = {UNTOUCHED: Way(BASE, _as_it_is), LORA: Way(ADAPTER, _as_it_is)}
    folder = options.work / f"lora-{SHARE}-{options.steps}"
    rank = served_rank(json.loads((folder / "adapter_config.json").read_bytes())["r"], str(folder))
    servers = {
        "InduceKV": (ways, ["--memory", f"{NAME}={_bundle(compared, options)}"]),
        "LoRA": (adapted, ["--enable-lora", "--max-lora-rank", str(rank), "--lora-modules", f"{ADAPTER}={folder}"]),
    }
    model = str(model_folder())
    flags = ["--served-model-name", BASE, "--dtype", "float32", "--max-num-seqs", str(AT_ONCE)]
    flags += ["--max-model-len", str(len(compared.token_ids) + SPARE)]
    asked = [each.example for group in ("questions", "cloze") for each in compared.held_out.questions[group]]
    found: dict[str, Any] = {}
    for server, (those, more) in servers.items():
        with serving([model, *flags, *more], options.work / f"{server}.log", ENVIRONMENT) as url, _load() as load:
            found[server] = _of_server(url, those, asked, options.rounds, options.crowds)
        found[server]["load"] = load
        print(server, json.dumps(found[server]), flush=True)
    return found


def _of_server(
    url: str, ways: Mapping[str, Way], asked: Sequence[Example], rounds: int, crowds: int
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
        if name != "document in the prompt":  # the same answers as of the cached one
            said = [answer.text for answer in served_answers(url, way.model, list(map(way.put, others)), TOLD)]
            row["others_unchanged"] = sum(map(str.__eq__, said, plain)) / len(others)
        if name == MEMORY:
            for group, questions in (("others", others), ("own", asked)):
                opened = [decided.task is not None for decided in served_decisions(url, NAME, questions)]
                row[f"{group}_opened"] = sum(opened) / len(opened)
        rows[name] = row
    return rows


def _in_a_crowd(name: str) -> bool:
    """16 prompts with the whole document would be minutes of prefill: its first token says what that is."""
    return name != "document in the prompt"


def _ratio(seconds: Mapping[str, Sequence[float]], name: str) -> float:
    """To the untouched model's in the same turn: the machine is not equally quiet in all."""
    return median(own / plain for own, plain in zip(seconds[name], seconds[UNTOUCHED], strict=True))


async def _first_tokens(
    url: str, ways: Mapping[str, Way], asked: Sequence[Example], rounds: int
) -> dict[str, list[float]]:
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


async def _crowds(url: str, ways: Mapping[str, Way], asked: Sequence[Example], crowds: int) -> dict[str, list[float]]:
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


def _body(way: Way, asked: Example, tokens: int, salts: Iterator[int]) -> dict[str, Any]:
    """A salt of its own keeps a request from what others have left in the prefix cache."""
    salt = "all" if way.cached else f"own {next(salts)}"
    return {"body": chat_body(way.model, messages_of(way.put(asked)), tokens, {}) | {"cache_salt": salt}}


def _bundle(compared: Compared, options: argparse.Namespace) -> Path:
    """The memory that was learned, behind a gate; it is made once."""
    path: Path = options.work / f"memory-{SHARE}-{options.steps}.safetensors"
    if not path.exists():
        settings, search = compared.learned(SHARE, "first", options.steps)
        inputs = TaskInputs((), (), (), previous=None, document=compared.document)
        fitted = gate_of(compared.backbone, compared.studied, inputs, settings)
        write_bundle(bundle_of(compared.backbone, inputs, settings, search, fitted, len(compared.token_ids)), path)
    return path


@contextmanager
def _load() -> Iterator[list[float]]:
    """The load average of a minute, before and after."""
    load = [os.getloadavg()[0]]
    yield load
    load.append(os.getloadavg()[0])


def _as_it_is(asked: Example) -> Example:
    return asked


def _text(asked: Example) -> str:
    return str(asked.messages[0]["content"][0]["text"])


if __name__ == "__main__":
    main()
