"""A damaged table is learned whole or refused: alike by the command, from Python, and row by row over HTTP."""

import codecs
import csv
import io
from http import HTTPStatus
from pathlib import Path
from random import Random
from typing import Any, Final

import pytest

from inducekv_vllm.bundle import read_bundle
from inducekv_vllm.errors import TaskDataError
from selector.api import read
from selector.cli.bundle import main
from selector.client import Server, ServerError, messages_of
from selector.data.examples import Example
from tests.engine.parity import World
from tests.server.launch import ADMIN_KEY

COLUMNS: Final = ("question", "answer", "id")
CITIES: Final = ("Lima", "Oslo", "Quito", "Cairo", "Seoul")
TEXTS: Final = (  # of a cell
    *("", " ", "\n", "\0", "a\0b", "\ufeff", "\u200b", "?!", "<image>", "<video> x", "<audio>", "<IMAGE>", "<|end|>"),
    *("=1+1", "'", '"', '""', ",", ";", "\t", "a\nb", "a\rb", "a\r\nb", "\u2028", "\x1a", "NaN", "null", "1e5", "007"),
    *("é" * 5, "e\u0301", "\u202eabc", "👋", "木", "x" * 120, "word " * 5000, "question", "answer", "examples/x"),
)
SLOW: Final = [pytest.mark.slow, pytest.mark.timeout(3600)]
Cells = list[tuple[str, ...]]
Facts = set[tuple[str, str, str]]  # question, answer, id


def table(number: int) -> Cells:
    """Three rows, whose ids no other table has."""
    cities = CITIES[number % 3 :][:3]
    return [(f"What is code {number} of {city}?", f"{city} {number}", f"{number}-{city}") for city in cities]


def with_other_cells(rng: Random, rows: Cells) -> Cells:
    """One in each of one to three rows."""
    rows = list(rows)
    for row in rng.sample(range(3), rng.randint(1, 3)):
        at = rng.choice((0, 0, 1, 1, 2))
        rows[row] = (*rows[row][:at], rng.choice(TEXTS), *rows[row][at + 1 :])
    return rows


def written(rng: Random, rows: Cells) -> bytes:
    """As programs write tables."""
    end, quoting = rng.choice((("\r\n", csv.QUOTE_MINIMAL), ("\r\n", csv.QUOTE_ALL), ("\n", csv.QUOTE_ALL)))
    text = io.StringIO()
    csv.writer(text, delimiter=rng.choice(",;\t"), lineterminator=end, quoting=quoting).writerows([COLUMNS, *rows])
    return text.getvalue().encode(rng.choice(("utf-8", "utf-8-sig", "utf-16")))


def damaged(rng: Random, content: bytes) -> bytes:
    """As a whole: a copy behind it, cut off, other bytes, line ends or encodings."""
    place, other = rng.randrange(len(content)), rng.choice((b"\0", b"\xff", b'"', b"\r", b"\n", b",", codecs.BOM_UTF8))
    return rng.choice(
        (
            content + content,
            content[:place],
            content[:place] + other + content[place:],
            content[:place] + other + content[place + 1 :],
            content.replace(b"\n", b"\r"),
            content.replace(b"\n", b"\n\n"),
            content.decode("latin-1").encode("utf-16-le"),
        )
    )


def rows_in(content: bytes) -> Cells:
    """The rows of a table that is valid, read by other code than the repository's."""
    text = content.decode("utf-16" if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) else "utf-8-sig")
    delimiter = next(found for found in text if found in ",;\t")
    header, *rows = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter)
    order = [header.index(name) for name in COLUMNS if name in header]
    return [tuple(row[at] for at in order) for row in rows if any(cell.strip() for cell in row)]


def by_command(model: Path, path: Path) -> Facts | None:
    output = path.with_suffix(".safetensors")
    if main(["teach", "--model", str(model), "--task", str(path), "--output", str(output)]) != 0:
        assert not output.exists()
        return None
    return {(fact.question, fact.answer, fact.id) for fact in read_bundle(output).metadata.facts}


def from_python(path: Path) -> list[Example] | None:
    try:
        return read(path)
    except TaskDataError:
        return None


def over_http(server: Server, examples: list[dict[str, Any]]) -> Facts | None:
    try:
        taught = server.teach("mutated", examples)
    except ServerError as error:
        if error.status not in (HTTPStatus.BAD_REQUEST, HTTPStatus.UNPROCESSABLE_ENTITY):
            raise
        return None
    listed = {fact["id"]: fact for fact in server.facts("mutated")}
    return {(listed[id]["question"], listed[id]["answer"], id) for id in taught["ids"]}


def posted(row: tuple[str, ...]) -> dict[str, Any]:
    question, answer, identity = row
    body = {"messages": [{"role": "user", "content": question}], "answer": answer}
    return body | ({"id": identity} if identity else {})


@pytest.mark.parametrize("mutations", [30, pytest.param(200, marks=SLOW)])
def test_mutated_tables(mutations: int, server: str, world: World, tmp_path: Path) -> None:
    rng, client = Random(68), Server(server, ADMIN_KEY)
    for number in range(mutations):
        path, rows = tmp_path / f"t{number}.csv", table(number)
        if is_cell := rng.random() < 0.6:
            rows = with_other_cells(rng, rows)
        content = written(rng, rows)
        path.write_bytes(content if is_cell else damaged(rng, content))
        command, examples = by_command(world.model, path), from_python(path)
        if examples is None:
            assert command is None
            if is_cell:
                assert over_http(client, [posted(row) for row in rows]) is None, rows
            continue
        expected = rows if is_cell else rows_in(path.read_bytes())
        assert [(example.messages[0]["content"][0]["text"], example.answer) for example in examples] == [
            row[:2] for row in expected
        ]
        sent = [{"id": each.id, "messages": messages_of(each), "answer": each.answer} for each in examples]
        assert over_http(client, sent) == command, rows
