"""Reads published files: arrays of rows, tables of annotations, and predictions."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from benchmarks.research.published.scorers.scored import Prediction, Question
from inducekv_vllm.errors import TaskDataError

MAX_JSON_BYTES: Final = 1 << 30  # of a file that is read as a whole
MAX_LINE_BYTES: Final = 1 << 22
COCO: Final = re.compile(r"COCO_((?:train|val|test)20\d\d)_\d+")


def require_folder(data: Path) -> Path:
    """Raises TaskDataError: it is no folder."""
    if data.is_dir():
        return data
    if data.suffix in (".zip", ".tar", ".gz", ".tgz"):
        raise TaskDataError(f"{data}: expected a folder, found an archive: unpack it first")
    raise TaskDataError(f"{data}: expected the folder of a suite, found {'a file' if data.exists() else 'nothing'}")


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a JSON array. Raises TaskDataError: names the file and the row."""
    rows = read_table(path)
    if not isinstance(rows, list):
        raise TaskDataError(f"{path}: expected a JSON array, found {rows!r:.40}")
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, dict):
            raise TaskDataError(f"{path}, item {number}: expected a JSON object, found {row!r:.40}")
        yield row


def read_table(path: Path) -> Any:
    """A JSON file that is one value. Raises TaskDataError: names the file."""
    try:
        if (size := path.stat().st_size) > MAX_JSON_BYTES:
            raise TaskDataError(f"{path}: expected at most {MAX_JSON_BYTES} bytes of annotations, found {size}")
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise TaskDataError(f"{path}: cannot read the file: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise TaskDataError(f"{path}: malformed JSON: {error}") from error


def text_of(row: dict[str, Any], place: str, *names: str) -> str:
    """The row's value by the first name that it has, as text. Raises TaskDataError: it has none of them."""
    for name in names:
        if row.get(name) is not None:
            return str(row[name])
    raise TaskDataError(f"{place}: expected {' or '.join(names)}, found {', '.join(map(str, row)) or 'nothing'}")


def pictures_of(row: Mapping[str, Any]) -> list[str]:
    """A row's picture, or its list of them; none for text alone. VQACL names COCO's pictures by their ids."""
    found = row.get("image")
    if found is None and (coco := COCO.fullmatch(str(row.get("img_id")))):
        found = f"{coco[1]}/{coco[0]}.jpg"
    return [] if found is None else [str(each) for each in found] if isinstance(found, list) else [str(found)]


def read_questions(path: Path, answer: str = "answer") -> list[Question]:
    """Test rows: `question_id`, `text` and an answer.

    Raises TaskDataError: names the row that lacks one of them, or repeats an id.
    """

    def question(row: dict[str, Any], place: str) -> Question:
        name, text = text_of(row, place, "question_id", "id"), text_of(row, place, "text", "question")
        return Question(name, text, (text_of(row, place, answer),), row)

    return collected(path, read_rows(path), question)


def collected(
    path: Path,
    rows: Iterable[dict[str, Any]],
    question: Callable[[dict[str, Any], str], Question],
    *,
    first: int = 1,
    of: str = "item",
) -> list[Question]:
    """The test question that `question` makes of each row and its place, which is counted from `first`.

    Raises TaskDataError: an id is repeated, or there is no row.
    """
    questions: dict[str, Question] = {}
    for number, row in enumerate(rows, start=first):
        place = f"{path}, {of} {number}"
        found = question(row, place)
        if found.id in questions:
            raise TaskDataError(f"{place}: the id {found.id!r} occurs more than once among the test questions")
        questions[found.id] = found
    if not questions:
        raise TaskDataError(f"{path}: the file holds no questions")
    return list(questions.values())


def read_predictions(path: Path, task: str) -> list[Prediction]:
    """JSON lines with `question_id` and `text`, in their order, repeated ids too.

    The predictions.jsonl of a run of `benchmarks.research.continual` will do: `id` and `answer`, lines of other tasks
    left out.

    Raises TaskDataError: names the line.
    """
    predictions = []
    try:
        with path.open("rb") as file:
            for number, line in enumerate(iter(lambda: file.readline(MAX_LINE_BYTES + 1), b""), start=1):
                place = f"{path}, line {number}"
                if len(line) > MAX_LINE_BYTES:
                    raise TaskDataError(f"{place}: longer than {MAX_LINE_BYTES} bytes")
                if not line.strip():
                    continue
                try:
                    row = json.loads(line)
                except (ValueError, RecursionError) as error:
                    raise TaskDataError(f"{place}: malformed JSON: {error}") from error
                if not isinstance(row, dict):
                    raise TaskDataError(f"{place}: expected an object with question_id and text, found {row!r:.40}")
                if row.get("task", task) != task:
                    continue
                name, text = text_of(row, place, "question_id", "id"), text_of(row, place, "text", "answer")
                predictions.append(Prediction(name, text))
    except OSError as error:
        raise TaskDataError(f"{path}: cannot read the predictions: {error.strerror}") from error
    if not predictions:
        raise TaskDataError(f"{path}: the file holds no predictions")
    return predictions
