"""Task data: read, check and digest training examples.

`rows` has the formats of files, `records` the layouts of rows. Ours is JSON lines, one example a line:

    {"id": "a1", "task": "colours", "messages": [{"role": "user", "content": [
      {"type": "image_url", "image_url": {"url": "images/a1.png"}}, {"type": "text", "text": "Which colour?"}]}],
    "answer": "red"}

Images are paths relative to the file and must lie beneath its folder.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from reprlib import repr as shown
from typing import Any, Final

from PIL import Image

from inducekv_vllm.bundle import EntryRecord
from inducekv_vllm.bundle.metadata import MAX_ID, MAX_WORDING_BYTES, MAX_WORDINGS, is_unicode
from inducekv_vllm.bundle.source import source_digest_of
from inducekv_vllm.errors import TaskDataError
from inducekv_vllm.files.picture import decoded

from .notes import Notes
from .records import BY_NAME, Columns, record_of
from .rows import rows_of
from .turns import ROLES, require_no_calls, require_text, role_of

MAX_IMAGE_BYTES: Final = 64 * 2**20
MAX_PROBLEMS: Final = 10  # that an error lists
_URL: Final = re.compile(r"[a-z][a-z0-9+.-]*://|data:", re.IGNORECASE)


@dataclass(frozen=True)
class Example:
    """One training example; the prefix is `messages` with `images`, and never contains `answer`."""

    id: str
    task: str
    # Chat-template form: {"role": ..., "content": [{"type": "image"} | {"type": "text", "text": ...}, ...]}
    messages: tuple[dict[str, Any], ...]
    images: tuple[Path, ...]  # in the order of the image parts
    answer: str
    source_digest: str  # sha256 over the messages and the bytes of the images
    also: tuple[str, ...] = ()  # other wordings of the question, if it becomes a fact
    place: str = field(default="", compare=False)  # where it was read, for messages: a file and a line

    def load_images(self) -> list[Image.Image]:
        """The images in RGB, decoded as the server decodes them."""
        return [decoded(path.read_bytes()) for path in self.images]


def entry_records(examples: Sequence[Example]) -> tuple[EntryRecord, ...]:
    return tuple(EntryRecord(id=e.id, task=e.task, source_digest=e.source_digest) for e in examples)


def read_task(path: str | Path, columns: Columns = BY_NAME) -> list[Example]:
    """Read a whole task file, and open every image once to check it.

    Issues a TaskDataWarning for columns that are not used, and for rows that are not to be learned.

    Args:
        columns: which hold what, where it is not to be found by their names.

    Raises:
        TaskDataError: naming the file, the line or item, and the problem; up to ten of several.
    """
    source = Path(path)
    return examples_of(rows_of(source), source.parent, columns, source.stem, str(source))


def examples_of(
    rows: Iterable[tuple[str, Mapping[str, Any] | Example | TaskDataError]],
    folder: Path,
    columns: Columns,
    task: str,
    source: str,
) -> list[Example]:
    """The examples of rows, each with its place for messages. Issues a TaskDataWarning as `read_task` does.

    Args:
        folder: pictures lie beneath it.
        task: the name of the task of rows without one.
        source: of all rows, for messages.

    Raises:
        TaskDataError: naming the place and the problem; up to ten of several.
    """
    examples: dict[str, Example] = {}
    problems: list[TaskDataError] = []
    wrong, notes = 0, Notes(source)
    for number, (place, row) in enumerate(rows, start=1):
        try:
            if isinstance(row, TaskDataError):
                raise row
            if not isinstance(row, Example):
                if not isinstance(row, Mapping):
                    raise TaskDataError(f"{place}: expected a dictionary of columns, found {shown(row)}")
                record = record_of(row, columns, number, task, place, notes)
                if record is None:
                    continue
                row = example_of(record, folder, place)
            if row.id in examples:
                raise TaskDataError(f"{place}: the id {row.id!r} occurs more than once")
            examples[row.id] = row
        except TaskDataError as problem:
            wrong += 1
            problems = [*problems, problem][:MAX_PROBLEMS]
    if wrong == 1:
        raise problems[0]
    if wrong:
        error = TaskDataError(f"{source}: {wrong} examples are wrong, none was used")
        error.problems = tuple(problems)
        raise error
    if not examples:
        raise TaskDataError("; ".join((f"{source}: the file holds no examples", *notes.lines())))
    notes.warn()
    return list(examples.values())


def example_of(record: dict[str, Any], folder: Path, place: str) -> Example:
    """The example of one JSON line; its pictures lie beneath `folder`. Raises TaskDataError, beginning with `place`."""
    identity = record.get("id")
    if isinstance(identity, int) and not isinstance(identity, bool):
        identity = str(identity)
    for name, value in (("task", record.get("task")), ("id", identity)):
        if not isinstance(value, str) or not value:
            raise TaskDataError(f"{place}: {name!r} must be a non-empty string, found {shown(value)}")
        require_text(value, repr(name), "text alone", place)
        if not is_unicode(value):
            raise TaskDataError(f"{place}: {name!r} must be Unicode, found {shown(value)}: is the file's name UTF-8?")
    if len(str(identity)) > MAX_ID:
        raise TaskDataError(f"{place}: 'id' must have at most {MAX_ID} characters, found {len(str(identity))}")
    if not isinstance(record.get("answer"), str):
        raise TaskDataError(f"{place}: 'answer' must be a string, found {shown(record.get('answer'))}")
    require_text(record["answer"], "the answer", "text alone", place)
    if not record["answer"].strip():
        raise TaskDataError(f"{place}: {str(identity)!r} of task {record['task']!r} has an empty answer")
    if not isinstance(record.get("messages"), list) or not record["messages"]:
        raise TaskDataError(f"{place}: 'messages' must be a non-empty list of chat messages")

    images: list[Path] = []
    messages = tuple(
        _message(message, number, folder, images, place) for number, message in enumerate(record["messages"], start=1)
    )
    if messages[-1]["role"] != "user":
        raise TaskDataError(f"{place}: the last message must be the user's, found role {messages[-1]['role']!r}")
    return Example(
        id=str(identity),
        task=record["task"],
        messages=messages,
        images=tuple(images),
        answer=record["answer"],
        source_digest=source_digest_of(messages, [_picture_file(path, place)[0] for path in images]),
        also=_wordings(record.get("also"), place),
        place=place,
    )


def _wordings(also: Any, place: str) -> tuple[str, ...]:
    if also is None or also == "":
        return ()
    if not isinstance(also, list | tuple) or not all(isinstance(each, str) for each in also):
        raise TaskDataError(f"{place}: 'also' must be a list of other wordings of the question, found {shown(also)}")
    if len(also) > MAX_WORDINGS:
        raise TaskDataError(f"{place}: 'also' may have {MAX_WORDINGS} wordings, found {len(also)}")
    for wording in also:
        require_text(wording, "a wording in 'also'", "text alone", place)
        if not 1 <= (size := len(wording.encode())) <= MAX_WORDING_BYTES:
            raise TaskDataError(
                f"{place}: a wording in 'also' must have 1 to {MAX_WORDING_BYTES} bytes, found {size}: {shown(wording)}"
            )
    return tuple(also)


def _message(message: Any, number: int, folder: Path, images: list[Path], place: str) -> dict[str, Any]:
    """Bring one message into chat-template form; the paths of its images are appended to `images`."""
    if not isinstance(message, dict) or "role" not in message:
        raise TaskDataError(f"{place}: each message needs a 'role' of {', '.join(ROLES)}, found {shown(message)}")
    role = role_of(message["role"], ROLES, number, place)
    parts = message.get("content")
    if isinstance(parts, str):
        parts = [{"type": "text", "text": parts}]
    if parts is None:
        require_no_calls(message, number, place)
    if not isinstance(parts, list):
        raise TaskDataError(f"{place}: a message's 'content' must be a string or a list of parts")
    content: list[dict[str, Any]] = []
    for part in parts:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "text" and isinstance(part.get("text"), str):
            require_text(part["text"], f"message {number}", "text and pictures", place)
            content.append({"type": "text", "text": part["text"]})
        elif kind in ("image", "image_url"):
            images.append(_image_path(part, folder, place))
            content.append({"type": "image"})
        else:
            raise TaskDataError(f"{place}: a content part must be a text, image or image_url, found {shown(part)}")
    return {"role": role, "content": content}


def _image_path(part: dict[str, Any], folder: Path, place: str) -> Path:
    reference = part.get("image")
    if part["type"] == "image_url":
        url = part.get("image_url")
        reference = url.get("url") if isinstance(url, dict) else url
    if not isinstance(reference, str) or not reference:
        raise TaskDataError(f"{place}: an image must be a relative path, found {shown(reference)}")
    return _path_beneath(reference, folder, place)


def is_url(reference: str) -> bool:
    return _URL.match(reference) is not None


def picture_beneath(reference: str, folder: Path, place: str) -> Image.Image:
    """A picture in RGB, beneath the folder of the file that names it.

    Raises:
        TaskDataError: it is a URL, lies outside the folder, is not there, or cannot be used; begins with `place`.
    """
    return _picture_file(_path_beneath(reference, folder, place), place)[1]


def _path_beneath(reference: str, folder: Path, place: str) -> Path:
    if found := _URL.match(reference):
        is_data = found[0].lower() == "data:"
        raise TaskDataError(
            f"{place}: the picture {shown(reference)} is a "
            + ("data URL: write its bytes to a file" if is_data else "URL, and nothing is downloaded: save it")
            + " beside this one, and its path here"
        )
    path = folder / reference
    try:
        is_inside = path.resolve().is_relative_to(folder.resolve())
    except (OSError, ValueError, RuntimeError) as error:  # too long, NUL, or a circle of links
        raise TaskDataError(f"{place}: {shown(reference)} is not the name of an image: {error!s:.80}") from error
    if not is_inside:
        raise TaskDataError(f"{place}: the image {shown(reference)} lies outside the folder of the file that names it")
    return path


def _picture_file(path: Path, place: str) -> tuple[bytes, Image.Image]:
    try:
        if not path.is_file():
            raise TaskDataError(f"{place}: the image {path} does not exist")
        if (size := path.stat().st_size) > MAX_IMAGE_BYTES:
            raise TaskDataError(f"{place}: the image {path} has {size} bytes, more than {MAX_IMAGE_BYTES}")
        data = path.read_bytes()
    except OSError as error:
        raise TaskDataError(f"{place}: the image {path} cannot be read: {error.strerror}") from error
    try:
        return data, decoded(data)
    except TaskDataError as error:
        raise TaskDataError(f"{place}: {path!s:.200}: {error}") from error
