"""Task data: both formats, and a clear word for everything that can be wrong with them."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from inducekv_vllm.errors import TaskDataError
from selector.data.examples import read_task
from tests.task_data import QUESTIONS, record, write_task
from tests.tiny_models import picture


def test_json_lines_are_read(task_file: Path) -> None:
    examples = read_task(task_file)
    assert [example.id for example in examples] == [f"e{number}" for number in range(12)]
    first = examples[0]
    assert (first.task, first.answer) == ("colours", "answer 0")
    assert first.messages == ({"role": "user", "content": [{"type": "image"}, {"type": "text", "text": QUESTIONS[0]}]},)
    assert first.images == (task_file.parent / "images" / "0.png",)
    assert first.load_images()[0].tobytes() == picture(0).tobytes()


def test_forms_of_images_and_content_mean_the_same(tmp_path: Path) -> None:
    text = {"type": "text", "text": QUESTIONS[0]}
    forms = [
        [{"type": "image_url", "image_url": {"url": "images/0.png"}}, text],
        [{"type": "image_url", "image_url": "images/0.png"}, text],
        [{"type": "image", "image": "images/0.png"}, text],
    ]
    lines = [record(n, messages=[{"role": "user", "content": form}]) for n, form in enumerate(forms)]
    lines.append(record(7, messages=[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "yes?"}]))
    *same, plain = read_task(write_task(tmp_path, lines))
    assert len({example.source_digest for example in same}) == 1
    assert plain.images == ()
    assert plain.messages[0] == {"role": "system", "content": [{"type": "text", "text": "Be brief."}]}


def test_blank_lines_and_line_separators_inside_strings(tmp_path: Path) -> None:
    path = write_task(tmp_path, [])
    lines = [json.dumps(record(0, answer="a\u2028b"), ensure_ascii=False), "", json.dumps(record(1)), "  "]
    path.write_text("\n".join(lines), encoding="utf-8")
    assert [example.answer for example in read_task(path)] == ["a\u2028b", "answer 1"]


def test_llava_conversations_are_read(tmp_path: Path) -> None:
    write_task(tmp_path, [])
    turns = [
        {"from": "human", "value": "<image>\nWhich colour?"},
        {"from": "gpt", "value": "red"},
        {"from": "human", "value": "And the other?\n<image>"},
        {"from": "gpt", "value": "blue"},
    ]
    items = [
        {"id": 5, "image": ["images/0.png", "images/1.png"], "conversations": turns},
        {"id": "b", "image": "images/2.png", "conversations": turns[:2]},
        {"id": "c", "conversations": [{"from": "human", "value": "Hello"}, {"from": "gpt", "value": "Hi"}]},
    ]
    path = tmp_path / "colours.json"
    path.write_text(json.dumps(items))
    two, one, none = read_task(path)
    assert (two.id, two.task, two.answer) == ("5", "colours", "blue")
    assert [message["role"] for message in two.messages] == ["user", "assistant", "user"]
    assert two.messages[2]["content"] == [{"type": "text", "text": "And the other?"}, {"type": "image"}]
    assert [image.name for image in two.images] == ["0.png", "1.png"]
    assert one.messages[0]["content"] == [{"type": "image"}, {"type": "text", "text": "Which colour?"}]
    assert none.images == ()


def test_the_digest_follows_content_not_place(tmp_path: Path) -> None:
    first = read_task(write_task(tmp_path / "a", [record(0)]))[0]
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    assert read_task(tmp_path / "b" / "train.jsonl")[0].source_digest == first.source_digest
    picture(99).save(tmp_path / "b" / "images" / "0.png")
    assert read_task(tmp_path / "b" / "train.jsonl")[0].source_digest != first.source_digest
    other_question = record(0)
    other_question["messages"][0]["content"][1]["text"] += " "
    assert read_task(write_task(tmp_path / "c", [other_question]))[0].source_digest != first.source_digest


def with_image(reference: Any) -> dict[str, Any]:
    return record(1, messages=[{"role": "user", "content": [{"type": "image", "image": reference}]}])


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('{"id": ', "malformed JSON"),
        ("[1]", "expected a JSON object, found list"),
        ("[" * 100000, "malformed JSON"),
        (record(1, id=True), "'id' must be a non-empty string"),
        (record(1, id="x" * 257), "'id' must have at most 256 characters, found 257"),
        (record(1, task=3), "'task' must be a non-empty string, found 3"),
        (record(1, answer=None), "'answer' must be a string"),
        (record(1, messages=[]), "'messages' must be a non-empty list"),
        (
            record(1, messages=[{"role": "judge", "content": "x"}]),
            "message 1 has the role 'judge'; expected one of system, developer,",
        ),
        (record(1, messages=[{"content": "x"}]), "needs a 'role'"),
        (record(1, messages=[{"role": "user", "content": 5}]), "'content'"),
        (record(1, messages=[{"role": "user", "content": [{"type": "audio"}]}]), "content part"),
        (record(1, messages=[{"role": "assistant", "content": "x"}]), "last message must be the user's"),
        (record(1, id="e0"), "'e0' occurs more than once"),
        (with_image("images/none.png"), "images/none.png does not exist"),
        (with_image("https://example.org/x.png"), "'https://example.org/x.png' is a URL, and nothing is downloaded"),
        (with_image("data:image/png;base64,AAAA"), "is a data URL: write its bytes to a file beside this one"),
        (record(1, answer=" "), "'e1' of task 'colours' has an empty answer"),
        (with_image("images/cut.png"), "cut.png: the picture cannot be decoded: image file is truncated"),
        (with_image("../elsewhere.png"), "lies outside the folder of the file that names it"),
        (with_image("images/link.png"), "lies outside the folder of the file that names it"),
        (with_image("images/" + "x" * 300 + ".png"), "File name too long"),
        (with_image("images/a\0.png"), "not the name of an image"),
        (with_image("images/\ud800.png"), "half of a surrogate pair: '\\ud800'"),
        ('{"id": ' + "9" * 5000 + "}", "malformed JSON: Exceeds the limit"),
        (with_image(None), "must be a relative path"),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
def test_bad_lines_are_named(tmp_path: Path, line: Any, problem: str) -> None:
    path = write_task(tmp_path / "task", [record(0)])
    (tmp_path / "task/images/cut.png").write_bytes((tmp_path / "task/images/0.png").read_bytes()[:-30])
    picture(0).save(tmp_path / "elsewhere.png")
    (tmp_path / "task/images/link.png").symlink_to(tmp_path / "elsewhere.png")
    text = line if isinstance(line, str) else json.dumps(line)
    path.write_text(path.read_text() + "\n" + text + "\n")
    with pytest.raises(TaskDataError) as error:
        read_task(path)
    assert str(error.value).startswith(f"{path}, line 3: ")
    assert problem in str(error.value)
    assert len(str(error.value)) < 600


def test_bad_files_are_named(tmp_path: Path) -> None:
    path = tmp_path / "task.jsonl"
    with pytest.raises(TaskDataError, match=r"task.jsonl: cannot read"):
        read_task(path)
    for content in ("", "\n \n"):
        path.write_text(content)
        with pytest.raises(TaskDataError, match=r"task.jsonl: the file holds no examples"):
            read_task(path)
    for content in ("id,question,answer\n1,Which?,red\n", "id\tanswer\n"):
        path.write_text(content)
        with pytest.raises(TaskDataError, match=r"task.jsonl, line 1: expected JSON lines, one object .* found 'id"):
            read_task(path)
    with pytest.raises(TaskDataError, match="not the name of a file: embedded null"):
        read_task(tmp_path / "a\0b")
    path.write_bytes(b"{\xff")
    with pytest.raises(TaskDataError, match="not UTF-8"):
        read_task(path)


def conversation(*turns: tuple[str, str], **more: Any) -> list[dict[str, Any]]:
    """One LLaVA item with turns of (from, value)."""
    return [{"id": "a", "conversations": [{"from": who, "value": said} for who, said in turns]} | more]


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("", "holds no examples"),
        ("[", "malformed JSON"),
        ([], "holds no examples"),
        ({}, "no column is the prompt"),
        ("x", "expected a JSON array"),
        ([3], "item 1: expected a JSON object"),
        (conversation(), "item 1: 'conversations'"),
        (conversation(("human", "<image>"), ("gpt", "x")), "more <image> marks than images"),
        (conversation(("human", "a"), ("gpt", "x"), image="x.png"), "no <image> mark"),
        (conversation(("gpt", "a"), ("human", "x")), "last turn"),
        (conversation(("bot", "a"), ("gpt", "x")), "message 1 has the role 'bot'; expected one of"),
        ([{"conversations": [{"from": "human"}, {"from": "gpt", "value": "x"}]}], "each turn needs"),
    ],
)
def test_bad_llava_files_are_named(tmp_path: Path, content: Any, problem: str) -> None:
    path = tmp_path / "task.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(TaskDataError, match=problem) as error:
        read_task(path)
    assert str(path) in str(error.value)
