"""Mutations of task files, of both formats: of their bytes and lines, of the JSON, of the pictures and their names."""

from __future__ import annotations

import hashlib
import io
import json
import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from selector.data.examples import MAX_EXAMPLE_BYTES
from tests.mutation.json_damage import STRINGS, bombs, digits, edit, nested, text_of
from tests.selector.conftest import record
from tests.tiny_models import picture

DAMAGED = "images/damaged.bin"  # a picture of one mutation
PICTURES = ("PNG", "JPEG", "GIF", "WEBP", "BMP", "TIFF", "PPM", "ICO")
NAMES = (
    *("images/1.png", "images/none.png", "images", ".", "..", "../x.png", "/etc/hostname", "//images/0.png"),
    *("images/0.png/", "images/./0.png", "images/../images/0.png", "images/0.PNG", "images/\0.png", "images/é.png"),
    *("https://example.org/x.png", "file:///etc/hostname", "data:image/png;base64,AAAA", "~/x.png", "CON", "C:\\x.png"),
    *("x" * 300, "x/" * 3000, "images/0.png\n", "images/link.png", "images/loop.png", DAMAGED, "train.jsonl"),
)
CSV = ("id,question,answer\n1,Which?,red\n", '"id","answer"\n"1","red"\n', "id\tanswer\n1\tred\n", "# tasks\n- red\n")


@dataclass(frozen=True, repr=False)
class MutatedTask:
    """A task file, and the picture that some of its lines name."""

    suffix: str
    content: bytes
    picture: bytes = b""
    size: int | None = None  # of a sparse task file; None: the content's
    picture_size: int | None = None  # of a sparse picture

    def __repr__(self) -> str:
        sizes = f"size={self.size}, picture_size={self.picture_size}"
        return f"MutatedTask({self.suffix}, {self.content!r:.3000}, {self.picture!r:.1000}, {sizes})"

    def write(self, folder: Path) -> Path:
        path = folder / f"train{self.suffix}"
        for file, content, size in (
            (path, self.content, self.size),
            (folder / DAMAGED, self.picture, self.picture_size),
        ):
            file.write_bytes(content)
            if size is not None:
                os.truncate(file, size)
        return path


def make_folder(folder: Path) -> None:
    """The pictures that task files name."""
    images = folder / "images"
    images.mkdir()
    for number in range(4):
        (images / f"{number}.png").write_bytes(pictures()["PNG"])
    (images / "link.png").symlink_to("/etc/hostname")
    (images / "loop.png").symlink_to("loop.png")


@cache
def pictures() -> dict[str, bytes]:
    """A small picture in several formats."""
    found = {}
    for kind in PICTURES:
        file = io.BytesIO()
        picture(0).save(file, kind)
        found[kind] = file.getvalue()
    return found


def records() -> list[Any]:
    """Of JSON lines."""
    turns = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}]
    asked = {
        "role": "user",
        "content": [{"type": "image", "image": "images/1.png"}, {"type": "text", "text": "Größe? 🙂"}],
    }
    return [
        record(0),
        record(1, id=7, messages=[{"role": "system", "content": "Be brief."}, *turns, asked]),
        record(2, messages=[{"role": "user", "content": [{"type": "image_url", "image_url": "images/2.png"}]}]),
    ]


def conversations() -> list[Any]:
    """Of LLaVA's JSON."""
    turns = [{"from": "human", "value": "<image>\nWhich colour?"}, {"from": "gpt", "value": "red"}]
    more = [
        {"from": "system", "value": "Be brief."},
        {"from": "human", "value": "Hello"},
        {"from": "gpt", "value": "Hi"},
    ]
    return [
        {"id": 5, "image": "images/0.png", "conversations": turns},
        {"id": "b", "image": ["images/1.png"], "conversations": turns},
        {"id": "c", "conversations": more},
    ]


@st.composite
def mutated_tasks(draw: st.DrawFn) -> MutatedTask:
    """One file of either format with a mutation of one kind."""
    suffix = draw(st.sampled_from((".jsonl", ".jsonl", ".json")))
    return draw(st.sampled_from(KINDS))(draw, suffix)


def content_of(suffix: str, values: list[Any]) -> bytes:
    text = text_of(values) if suffix == ".json" else "\n".join(map(text_of, values)) + "\n"
    return text.encode("utf-8", "surrogatepass")


def values_of(suffix: str) -> list[Any]:
    return conversations() if suffix == ".json" else records()


def _json(draw: st.DrawFn, suffix: str) -> MutatedTask:
    values = values_of(suffix)
    for _ in range(draw(st.integers(1, 3))):
        number = draw(st.integers(0, len(values) - 1))
        values[number] = edit(draw, values[number])
    return MutatedTask(suffix, content_of(suffix, values))


def _bytes(draw: st.DrawFn, suffix: str) -> MutatedTask:
    content = bytearray(content_of(suffix, values_of(suffix)))
    place = draw(st.integers(0, len(content) - 1))
    match draw(st.sampled_from(("bit", "cut", "insert", "remove", "repeat"))):
        case "bit":
            content[place] ^= 1 << draw(st.integers(0, 7))
        case "cut":
            del content[place:]
        case "insert":
            content[place:place] = draw(
                st.binary(min_size=1, max_size=8) | st.sampled_from((b"\0", b"\xff\xfe", b"\n", b"\\"))
            )
        case "remove":
            del content[place : place + draw(st.integers(1, 40))]
        case "repeat":
            content[place:place] = content[place : place + draw(st.integers(1, 400))]
    return MutatedTask(suffix, bytes(content))


def _lines(draw: st.DrawFn, suffix: str) -> MutatedTask:
    """Line ends, empty lines, byte order marks, other encodings, twice the same, no lines at all."""
    lines = content_of(".jsonl", values_of(suffix)).decode().splitlines()
    lines = draw(st.permutations(lines))
    match draw(st.sampled_from(("blank", "ends", "twice", "one", "tabs"))):
        case "blank":
            lines = [
                *lines[:1],
                *draw(st.sampled_from(([""], [" \t"], [""] * 5000, ["\ufeff"], ["\0"], ["\x0c"]))),
                *lines[1:],
            ]
        case "twice":
            lines = [*lines, lines[0]]
        case "one":
            lines = [draw(st.sampled_from(("", " ", ",", "\r", "\u2028", "\x0b"))).join(lines)]
        case "tabs":
            lines = ["\t" + line + " " for line in lines]
    text = draw(st.sampled_from(("\n", "\r\n", "\r", "\n\n", ",\n"))).join(lines)
    if suffix == ".json":
        text = draw(st.sampled_from(("[{}]", "[{},]", "{}", "[{}", "[[{}]]", "[{}]]", " \n[{}] \n", "[{}]x"))).replace(
            "{}", text
        )
    text = draw(st.sampled_from(("", "", "\ufeff", "\n", " ", "\0"))) + text
    return MutatedTask(suffix, text.encode(draw(st.sampled_from(("utf-8", "utf-8", "utf-16", "utf-32", "utf-8-sig")))))


def _other(draw: st.DrawFn, suffix: str) -> MutatedTask:
    """Files that were meant for something else."""
    texts = st.sampled_from(
        (*CSV, *STRINGS, "[]", "{}", "null", "1", '"x"', "[[]]", "\ufeff[]", "NaN", "{}\n{}", "[1,2")
    )
    contents = texts.map(str.encode) | st.binary(max_size=200) | st.sampled_from(sorted(pictures().values()))
    return MutatedTask(suffix, draw(contents))


def _names(draw: st.DrawFn, suffix: str) -> MutatedTask:
    """Of pictures."""
    name = draw(st.sampled_from(NAMES) | st.text(max_size=20) | st.sampled_from(("images/\ud800.png", "a" * 5000)))
    return _with_picture(suffix, name, pictures()["PNG"])


def _pictures(draw: st.DrawFn, suffix: str) -> MutatedTask:
    content = bytearray(pictures()[draw(st.sampled_from(PICTURES))])
    for _ in range(draw(st.integers(1, 8))):
        # Most of what can be wrong stands at the beginning.
        place = draw(st.integers(0, min(len(content), draw(st.sampled_from((64, 400, 10**6)))) - 1))
        content[place] = draw(st.sampled_from((0, 1, 127, 128, 255)) | st.integers(0, 255))
    if draw(st.booleans()):
        del content[draw(st.integers(0, len(content))) :]
    size = draw(st.sampled_from((None, None, None, 10**7, 10**9, 10**12)))
    return _with_picture(suffix, DAMAGED, bytes(content), picture_size=size)


def _with_picture(suffix: str, name: str, content: bytes, **changes: Any) -> MutatedTask:
    values = values_of(suffix)
    if suffix == ".json":
        values[0]["image"] = name
    else:
        values[0]["messages"][0]["content"][0]["image_url"]["url"] = name
    return MutatedTask(suffix, content_of(suffix, values), content, **changes)


def huge(draw: st.DrawFn) -> MutatedTask:
    """Sparse files, and much to parse."""
    suffix = draw(st.sampled_from((".json", ".jsonl")))
    if draw(st.booleans()):
        content = draw(st.sampled_from((b"", content_of(suffix, values_of(suffix)), b"[", b'{"id":"', b"\n")))
        return MutatedTask(suffix, content, size=draw(st.sampled_from((10**6, 10**9, 10**12, 8 * 10**12))))
    values = values_of(suffix)
    much = bombs(draw(st.sampled_from((MAX_EXAMPLE_BYTES - 1000, 4 * MAX_EXAMPLE_BYTES))))
    deep = st.builds(nested, st.sampled_from(("[", '{"a":')), st.sampled_from((500, 990, 100_000)))
    bomb = draw(much | deep | st.sampled_from((4300, 4301, 10**6)).map(digits))
    values[1][draw(st.sampled_from(("id", "task", "messages", "conversations", "answer", "image", "else")))] = bomb
    return MutatedTask(suffix, content_of(suffix, values))


KINDS = (_json, _json, _json, _bytes, _bytes, _lines, _lines, _other, _names, _names, _pictures, _pictures, _pictures)


# ------------------------------------------------------------------------------------------------- what may come of one


def digests(path: Path) -> list[tuple[str, str]]:
    """The id and the source digest of each example, read and computed by other code than the repository's."""
    if path.suffix == ".json":
        values = [_as_record(item) for item in json.loads(path.read_bytes())]
    else:
        values = [json.loads(line) for line in path.read_bytes().split(b"\n") if line.strip()]
    return [(str(value["id"]), _digest(value["messages"], path.parent)) for value in values]


def _as_record(item: Any) -> Any:
    names = [item["image"]] if isinstance(item.get("image", []), str) else list(item.get("image", []))
    roles = {"human": "user", "gpt": "assistant", "system": "system"}
    messages = []
    for turn in item["conversations"][:-1]:
        content: list[Any] = []
        for number, text in enumerate(turn["value"].split("<image>")):
            content += [{"type": "image", "image": names.pop(0)}] if number else []
            content += [{"type": "text", "text": text.strip("\n")}] if text.strip() else []
        messages.append({"role": roles[turn["from"]], "content": content})
    return {"id": item["id"], "messages": messages}


def _digest(messages: list[Any], folder: Path) -> str:
    plain, images = [], []
    for message in messages:
        parts = message["content"]
        parts = [{"type": "text", "text": parts}] if isinstance(parts, str) else parts
        content = []
        for part in parts:
            if part["type"] == "text":
                content.append({"type": "text", "text": part["text"]})
                continue
            url = part["image"] if part["type"] == "image" else part["image_url"]
            name = url["url"] if isinstance(url, dict) else url
            images.append(hashlib.sha256((folder / name).read_bytes()).hexdigest())
            content.append({"type": "image"})
        plain.append({"role": message["role"], "content": content})
    text = json.dumps({"messages": plain, "images": images}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()
