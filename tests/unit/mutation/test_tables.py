"""A damaged table is read whole, as other code reads it, or refused."""

import codecs
import csv
import io
from pathlib import Path
from random import Random
from typing import Final

import pytest

from inducekv_vllm.errors import TaskDataError
from selector.data.examples import read_task

COLUMNS: Final = ("question", "answer", "id")
CITIES: Final = ("Lima", "Oslo", "Quito", "Cairo", "Seoul")
TEXTS: Final = (  # of a cell
    *("", " ", "\n", "\0", "a\0b", "\ufeff", "\u200b", "?!", "<image>", "<video> x", "<audio>", "<IMAGE>", "<|end|>"),
    *("=1+1", "'", '"', '""', ",", ";", "\t", "a\nb", "a\rb", "a\r\nb", "\u2028", "\x1a", "NaN", "null", "1e5", "007"),
    *("é" * 5, "e\u0301", "\u202eabc", "👋", "木", "x" * 120, "word " * 5000, "question", "answer", "examples/x"),
)
SLOW: Final = [pytest.mark.slow, pytest.mark.timeout(3600)]
Cells = list[tuple[str, ...]]


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


@pytest.mark.parametrize("mutations", [200, pytest.param(2_000, marks=SLOW)])
def test_mutated_tables(mutations: int, tmp_path: Path) -> None:
    rng, refused = Random(68), 0
    for number in range(mutations):
        path, rows = tmp_path / f"t{number}.csv", table(number)
        if is_cell := rng.random() < 0.6:
            rows = with_other_cells(rng, rows)
        content = written(rng, rows)
        path.write_bytes(content if is_cell else damaged(rng, content))
        try:
            examples = read_task(path)
        except TaskDataError:
            refused += 1
            continue
        expected = rows if is_cell else rows_in(path.read_bytes())
        assert [(example.messages[0]["content"][0]["text"], example.answer) for example in examples] == [
            row[:2] for row in expected
        ]
    assert mutations / 5 < refused < mutations
