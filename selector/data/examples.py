"""Task data: read, check and digest training examples.

Two formats, by the file's suffix:

- JSON lines (`.jsonl`), one example a line, OpenAI chat messages:
  `{"id": "a1", "task": "colours", "messages": [{"role": "user", "content": [
      {"type": "image_url", "image_url": {"url": "images/a1.png"}}, {"type": "text", "text": "Which colour?"}]}],
    "answer": "red"}`
- LLaVA's JSON (`.json`), an array; the task is the file's name, the answer is the last turn:
  `{"id": "a1", "image": "images/a1.png", "conversations": [{"from": "human", "value": "<image>\\nWhich colour?"},
    {"from": "gpt", "value": "red"}]}`

Images are paths relative to the file and must lie beneath its folder.
"""

from __future__ import annotations

import codecs
import io
import itertools
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from reprlib import repr as shown
from typing import Any, BinaryIO, Final, TextIO

from PIL import Image, ImageOps

from inducekv_vllm.bundle import EntryRecord
from inducekv_vllm.bundle.metadata import MAX_ID
from inducekv_vllm.bundle.source import source_digest_of
from inducekv_vllm.errors import TaskDataError
from inducekv_vllm.files.regular import open_regular

MAX_EXAMPLE_BYTES: Final = 4 * 2**20
MAX_IMAGE_BYTES: Final = 64 * 2**20
MAX_IMAGE_PIXELS: Final = 50_000_000  # decoding takes 9 bytes for each
_CHUNK: Final = 2**16
_ROLES = ("system", "user", "assistant")
_LLAVA_ROLES = {"system": "system", "human": "user", "gpt": "assistant"}


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

    def load_images(self) -> list[Image.Image]:
        """The images in RGB, decoded as the server decodes them."""
        return [decode_image(path.read_bytes()) for path in self.images]


def entry_records(examples: Sequence[Example]) -> tuple[EntryRecord, ...]:
    """The bundle's records of entries made from these examples."""
    return tuple(EntryRecord(id=e.id, task=e.task, source_digest=e.source_digest) for e in examples)


def read_task(path: str | Path) -> list[Example]:
    """Read a whole task file, and open every image once to check it.

    Raises:
        TaskDataError: naming the file, the line or item, and the problem.
    """
    source = Path(path)
    try:
        file = os.fdopen(open_regular(source), "rb")
    except OSError as error:
        raise TaskDataError(f"{source}: cannot read the task data: {error.strerror}") from error
    except ValueError as error:
        raise TaskDataError(f"{str(source)!r}: not the name of a file: {error}") from error
    examples: dict[str, Example] = {}
    with file:
        try:
            for place, record in _records(file, source):
                example = example_of(record, source.parent, place)
                if example.id in examples:
                    raise TaskDataError(f"{place}: the id {example.id!r} occurs more than once")
                examples[example.id] = example
        except OSError as error:
            raise TaskDataError(f"{source}: cannot read the task data: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise TaskDataError(f"{source}: the task data is not UTF-8 text: {error}") from error
    if not examples:
        raise TaskDataError(f"{source}: the file holds no examples")
    return list(examples.values())


def decode_image(data: bytes) -> Image.Image:
    """Decode to RGB the way vLLM decodes a request's image: EXIF rotation applied, transparency onto white.

    Raises:
        OSError, Image.DecompressionBombError: the bytes are no image, are truncated, or claim more than
            `MAX_IMAGE_PIXELS`.
    """
    image = Image.open(io.BytesIO(data))
    if (pixels := image.width * image.height) > MAX_IMAGE_PIXELS:
        raise Image.DecompressionBombError(f"it has {pixels} pixels, more than {MAX_IMAGE_PIXELS}")
    ImageOps.exif_transpose(image, in_place=True)
    image.load()
    if image.mode == "RGB":
        return image
    if image.mode == "RGBA":
        opaque = Image.new("RGB", image.size, (255, 255, 255))
        opaque.paste(image, mask=image.getchannel("A"))
        return opaque
    return image.convert("RGB")


def _records(file: BinaryIO, source: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The examples one after the other, each with its place for messages."""
    if source.suffix != ".json":
        yield from _jsonl_records(file, source)
        return
    for number, item in enumerate(array_items(io.TextIOWrapper(file, encoding="utf-8"), source), start=1):
        place = f"{source}, item {number}"
        yield place, _from_llava(_object(_encodable(item, place), place), source.stem, place)


def _jsonl_records(file: BinaryIO, source: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    # Lines of bytes end at "\n" alone, as JSON strings may contain U+2028 and the like.
    for number in itertools.count(1):
        line = file.readline(MAX_EXAMPLE_BYTES + 1)
        place = f"{source}, line {number}"
        if not line:
            return
        if len(line) > MAX_EXAMPLE_BYTES:
            raise TaskDataError(f"{place}: the line is longer than {MAX_EXAMPLE_BYTES} bytes")
        if not line.strip():
            continue
        if number == 1 and not line.removeprefix(codecs.BOM_UTF8).lstrip().startswith((b"{", b"[", b'"')):
            raise TaskDataError(
                f"{place}: expected JSON lines, one object with id, task, messages and answer on each, "
                f"found {line.decode()!r:.60}"
            )
        try:
            value = json.loads(line.decode())
        except UnicodeDecodeError:
            raise
        except (ValueError, RecursionError) as error:
            raise TaskDataError(f"{place}: malformed JSON: {error}") from error
        yield place, _object(_encodable(value, place), place)


def array_items(file: TextIO, source: Path) -> Iterator[Any]:
    """The items of a JSON array, of which never more than a few are in memory."""
    decoder = json.JSONDecoder()
    rest = _read_on("", file)
    if not rest:
        return
    if not rest.startswith("["):
        raise TaskDataError(f"{source}: expected a JSON array of conversations, found {rest!r:.20}")
    rest = _read_on(rest[1:], file)
    if not rest.startswith("]"):
        for number in itertools.count(1):
            item, rest = _first_item(rest, file, decoder, f"{source}, item {number}")
            yield item
            rest = _read_on(rest, file)
            if not rest.startswith(","):
                break
            rest = _read_on(rest[1:], file)
    if not rest.startswith("]") or _read_on(rest[1:], file):
        raise TaskDataError(f"{source}: malformed JSON: expected the end of the array, found {rest!r:.20}")


def _read_on(rest: str, file: TextIO) -> str:
    """What follows after white space; empty at the end of the file."""
    while not (rest := rest.lstrip(" \t\r\n")):
        if not (rest := file.read(_CHUNK)):
            break
    return rest


def _first_item(rest: str, file: TextIO, decoder: json.JSONDecoder, place: str) -> tuple[Any, str]:
    """The JSON value that a text begins with, and what follows it; reads on while it is not complete."""
    while True:
        try:
            item, end = decoder.raw_decode(rest)
        except (ValueError, RecursionError) as error:
            more = file.read(max(len(rest), _CHUNK))
            if len(rest) > MAX_EXAMPLE_BYTES:
                raise TaskDataError(f"{place}: malformed JSON, or longer than {MAX_EXAMPLE_BYTES} bytes") from error
            if not more:
                raise TaskDataError(f"{place}: malformed JSON: {error}") from error
            rest += more
        else:
            return item, rest[end:]


def _encodable(value: Any, place: str) -> Any:
    """JSON can name a half of a surrogate pair alone; no tokenizer and no file system takes it."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise TaskDataError(
            f"{place}: a string holds half of a surrogate pair: {error.object[error.start]!r}"
        ) from error
    except (ValueError, RecursionError) as error:
        raise TaskDataError(f"{place}: malformed JSON: {error}") from error
    return value


def _object(value: Any, place: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TaskDataError(f"{place}: expected a JSON object, found {type(value).__name__}")
    return value


def _from_llava(item: dict[str, Any], task: str, place: str) -> dict[str, Any]:
    """Rewrite a LLaVA conversation as a record of the JSON lines format."""
    images = item.get("image", [])
    images = list(images) if isinstance(images, list) else [images]
    turns = item.get("conversations")
    if not isinstance(turns, list) or len(turns) < 2:
        raise TaskDataError(f"{place}: 'conversations' must be a list of at least two turns")
    messages: list[dict[str, Any]] = []
    for turn in turns:
        speaker = turn.get("from") if isinstance(turn, dict) else None
        role = _LLAVA_ROLES.get(speaker) if isinstance(speaker, str) else None
        if role is None or not isinstance(turn.get("value"), str):
            raise TaskDataError(f"{place}: each turn needs 'from' (human, gpt or system) and a text 'value'")
        content: list[dict[str, Any]] = []
        for number, piece in enumerate(turn["value"].split("<image>")):
            if number:
                if not images:
                    raise TaskDataError(f"{place}: more <image> marks than images")
                content.append({"type": "image", "image": images.pop(0)})
            if piece.strip():
                content.append({"type": "text", "text": piece.strip("\n")})
        messages.append({"role": role, "content": content})
    if images:
        raise TaskDataError(f"{place}: {len(images)} images have no <image> mark in the conversation")
    if messages[-1]["role"] != "assistant":
        raise TaskDataError(f"{place}: the last turn must be from 'gpt': it is the answer")
    answer = "".join(part.get("text", "") for part in messages.pop()["content"])
    return {"id": item.get("id"), "task": task, "messages": messages, "answer": answer}


def example_of(record: dict[str, Any], folder: Path, place: str) -> Example:
    """The example of one JSON line; its pictures lie beneath `folder`. Raises TaskDataError, beginning with `place`."""
    identity = record.get("id")
    if isinstance(identity, int) and not isinstance(identity, bool):
        identity = str(identity)
    for name, value in (("id", identity), ("task", record.get("task"))):
        if not isinstance(value, str) or not value:
            raise TaskDataError(f"{place}: {name!r} must be a non-empty string, found {shown(value)}")
    if len(str(identity)) > MAX_ID:
        raise TaskDataError(f"{place}: 'id' must have at most {MAX_ID} characters, found {len(str(identity))}")
    if not isinstance(record.get("answer"), str):
        raise TaskDataError(f"{place}: 'answer' must be a string, found {shown(record.get('answer'))}")
    if not isinstance(record.get("messages"), list) or not record["messages"]:
        raise TaskDataError(f"{place}: 'messages' must be a non-empty list of chat messages")

    images: list[Path] = []
    messages = tuple(_message(message, folder, images, place) for message in record["messages"])
    if messages[-1]["role"] != "user":
        raise TaskDataError(f"{place}: the last message must be the user's, found role {messages[-1]['role']!r}")
    return Example(
        id=str(identity),
        task=record["task"],
        messages=messages,
        images=tuple(images),
        answer=record["answer"],
        source_digest=source_digest_of(messages, [_image_bytes(path, place) for path in images]),
    )


def _message(message: Any, folder: Path, images: list[Path], place: str) -> dict[str, Any]:
    """Bring one message into chat-template form; the paths of its images are appended to `images`."""
    if not isinstance(message, dict) or message.get("role") not in _ROLES:
        raise TaskDataError(f"{place}: each message needs a 'role' of {', '.join(_ROLES)}, found {shown(message)}")
    parts = message.get("content")
    if isinstance(parts, str):
        parts = [{"type": "text", "text": parts}]
    if not isinstance(parts, list):
        raise TaskDataError(f"{place}: a message's 'content' must be a string or a list of parts")
    content: list[dict[str, Any]] = []
    for part in parts:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "text" and isinstance(part.get("text"), str):
            content.append({"type": "text", "text": part["text"]})
        elif kind in ("image", "image_url"):
            images.append(_image_path(part, folder, place))
            content.append({"type": "image"})
        else:
            raise TaskDataError(f"{place}: a content part must be a text, image or image_url, found {shown(part)}")
    return {"role": message["role"], "content": content}


def _image_path(part: dict[str, Any], folder: Path, place: str) -> Path:
    reference = part.get("image")
    if part["type"] == "image_url":
        url = part.get("image_url")
        reference = url.get("url") if isinstance(url, dict) else url
    if not isinstance(reference, str) or not reference:
        raise TaskDataError(f"{place}: an image must be a relative path, found {shown(reference)}")
    path = folder / reference
    try:
        is_inside = path.resolve().is_relative_to(folder.resolve())
    except (OSError, ValueError, RuntimeError) as error:  # too long, NUL, or a circle of links
        raise TaskDataError(f"{place}: {shown(reference)} is not the name of an image: {error!s:.80}") from error
    if not is_inside:
        raise TaskDataError(f"{place}: the image {shown(reference)} lies outside the task file's folder")
    return path


def _image_bytes(path: Path, place: str) -> bytes:
    try:
        if not path.is_file():
            raise TaskDataError(f"{place}: the image {path} does not exist")
        if (size := path.stat().st_size) > MAX_IMAGE_BYTES:
            raise TaskDataError(f"{place}: the image {path} has {size} bytes, more than {MAX_IMAGE_BYTES}")
        data = path.read_bytes()
        decode_image(data)
    except TaskDataError:
        raise
    except Exception as error:  # Pillow's decoders raise whatever a damaged file leads them to
        raise TaskDataError(f"{place}: {path!s:.200} is not a readable image: {error!s:.200}") from error
    return data
