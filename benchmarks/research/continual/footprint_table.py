"""The bytes of a memory as parameters of an adapter or exemplars of replay (paper, "Budget conversion").

    python -m benchmarks.research.continual footprint [--config CONFIG.json] [--suite demo] [--budget B ...]

Prints a table for each model, and the same as one JSON line. The paper states two formulas that differ: its budget
conversion counts a payload for each of the H = 32 query heads, its bytes per entry one for each of the H_KV = 8 KV
heads. A bundle stores KV heads, so every table here follows the second; the first is kept, under its own name, for the
paper's two backbones. The paper's printed numbers of parameters and exemplars are those of the 8B model (d = 4096).
"""

from __future__ import annotations

import argparse
import io
import json
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Column, Table

from benchmarks.research.continual.geometry import TextGeometry, plan, read_config, text_geometry
from benchmarks.research.continual.suites import load_suite
from inducekv_vllm.backbone.footprint import FLOAT16_BYTES
from inducekv_vllm.errors import ConfigError
from selector.data.examples import Example

INT32_BYTES = 4
TEXT_TOKENS = 512  # of an exemplar's text, prefix and target (paper, Table "Budget conversion")
JPEG_QUALITY = 75  # PIL's default; the paper does not state its own
PAYLOAD_TOKENS = 8

# B (m = 8) of the paper's two tables: its conversion's, and those its results are reported with.
CONVERSION_TIERS: Mapping[str, int] = {"XS": 4, "S": 8, "M": 16, "L": 32}
RESULT_TIERS: Mapping[str, int] = {"S": 64, "M": 128, "L": 256, "XL": 512}
PAPER_BACKBONES: Mapping[str, TextGeometry] = {
    "4B (LLaVA-OneVision-1.5, Qwen3-VL)": TextGeometry(num_layers=36, num_kv_heads=8, head_dim=128, hidden_size=2560),
    "8B (LLaVA-OneVision-1.5, Qwen3-VL)": TextGeometry(num_layers=36, num_kv_heads=8, head_dim=128, hidden_size=4096),
}
PAPER_QUERY_HEADS = 32  # H of both


@dataclass(frozen=True)
class Conversion:
    """One budget of one model, and other uses of the same bytes."""

    budget: int  # B
    kv_tokens: int  # B m, in every layer
    bytes: int  # of the entries
    peft_parameters: int  # in float16
    text_exemplars: int
    picture_exemplars: int | None  # None: no pictures to measure were given

    @property
    def mebibytes(self) -> float:
        return self.bytes / 2**20


def conversions(
    geometry: TextGeometry,
    budgets: Iterable[int],
    *,
    payload_tokens: int = PAYLOAD_TOKENS,
    text_tokens: int = TEXT_TOKENS,
    picture_bytes: float | None = None,
) -> list[Conversion]:
    """A row for each budget; an exemplar takes `text_tokens` int32 ids, and `picture_bytes` for its pictures."""
    text_bytes = INT32_BYTES * text_tokens
    return [
        Conversion(
            budget=row.budget,
            kv_tokens=row.tokens,
            bytes=row.bytes,
            peft_parameters=row.bytes // FLOAT16_BYTES,
            text_exemplars=row.bytes // text_bytes,
            picture_exemplars=None if picture_bytes is None else int(row.bytes // (picture_bytes + text_bytes)),
        )
        for row in plan(geometry, payload_tokens, budgets)
    ]


def with_query_heads(geometry: TextGeometry, query_heads: int) -> TextGeometry:
    """As if a payload were stored for every query head, as in the paper's conversion table."""
    return TextGeometry(geometry.num_layers, query_heads, geometry.head_dim, geometry.hidden_size)


def mean_picture_bytes(examples: Sequence[Example], quality: int = JPEG_QUALITY) -> float:
    """Mean bytes of an example's pictures as JPEG, repeated ones each time. Raises ConfigError: there is no example."""
    if not examples:
        raise ConfigError("the mean size of pictures needs at least one example")
    total = 0
    for example in examples:
        for picture in example.load_images():
            encoded = io.BytesIO()
            picture.save(encoded, "JPEG", quality=quality)
            total += encoded.tell()
    return total / len(examples)


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "footprint", help="what the bytes of a memory buy elsewhere: the paper's budget conversion, computed"
    )
    add = parser.add_argument
    add("--config", type=Path, nargs="+", default=[], metavar="CONFIG.json", help="of other models than the paper's")
    add("--budget", type=int, nargs="+", help="entries (default: the tiers of the paper's two tables)")
    add("--payload-tokens", type=int, default=PAYLOAD_TOKENS, help=f"m (default {PAYLOAD_TOKENS})")
    add("--text-tokens", type=int, default=TEXT_TOKENS, help=f"of a replayed exemplar (default {TEXT_TOKENS})")
    add("--suite", metavar="demo|FILE", help="whose pictures are measured (default: none, and no such column)")
    parser.set_defaults(command=command)


def command(options: argparse.Namespace) -> int:
    """Prints the tables to standard error and one JSON line to standard output."""
    if min([options.payload_tokens, options.text_tokens, *(options.budget or [])]) < 1:
        raise ConfigError("budgets and numbers of tokens must be positive")
    settings = {"payload_tokens": options.payload_tokens, "text_tokens": options.text_tokens, "picture_bytes": None}
    if options.suite:
        with tempfile.TemporaryDirectory() as folder:
            tasks = load_suite(options.suite, Path(folder)).tasks
            settings["picture_bytes"] = mean_picture_bytes([example for task in tasks for example in task.train])
    models = {}
    console = Console(stderr=True, width=None if sys.stderr.isatty() else 140)
    for name, (geometry, budgets) in _models(options.config).items():
        rows = conversions(geometry, options.budget or budgets, **settings)
        models[name] = [{**asdict(row), "mebibytes": round(row.mebibytes, 2)} for row in rows]
        table = Table(*(Column(key.replace("_", " "), justify="right") for key in models[name][0]), title=name)
        for row in models[name]:
            table.add_row(*("–" if value is None else f"{value:,}" for value in row.values()))
        console.print(table)
    print(json.dumps({"benchmark": "footprint", **settings, "models": models}))
    return 0


def _models(configs: Sequence[Path]) -> dict[str, tuple[TextGeometry, list[int]]]:
    """Each table's name, its model, and the budgets it has by default."""
    models = {}
    for name, geometry in PAPER_BACKBONES.items():
        models[name] = (geometry, [*RESULT_TIERS.values()])
        counted = f"{name}, every query head counted, as the paper's conversion table does"
        models[counted] = (with_query_heads(geometry, PAPER_QUERY_HEADS), [*CONVERSION_TIERS.values()])
    tiers = sorted({*CONVERSION_TIERS.values(), *RESULT_TIERS.values()})
    return models | {str(config): (text_geometry(read_config(config)), tiers) for config in configs}
