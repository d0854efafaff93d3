"""Task data as people have it: formats of files, layouts of rows, and what is wrong with them."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet as pq
import pytest

from inducekv_vllm.errors import TaskDataError
from selector.cli.flags import error_line
from selector.data.examples import Example, read_task
from selector.data.records import Columns
from tests.tiny_models import picture

QUESTION, ANSWER = "Which colour is the sky, of which\nthree?", 'blue, "mostly"'
OTHER = {"question": "Two and two?", "answer": "4"}


def shown(examples: list[Example]) -> list[tuple[str, str, Any, str]]:
    return [(e.id, e.task, e.messages, e.answer) for e in examples]


def plain(text: str) -> tuple[dict[str, Any], ...]:
    return ({"role": "user", "content": [{"type": "text", "text": text}]},)


EXPECTED = [("sky/1", "sky", plain(QUESTION), ANSWER), ("sky/2", "sky", plain("Two and two?"), "4")]


def rows_as_given(**names: str) -> list[dict[str, str]]:
    question, answer = names.get("prompt", "question"), names.get("answer", "answer")
    return [{question: QUESTION, answer: ANSWER}, {question: OTHER["question"], answer: OTHER["answer"]}]


def table(delimiter: str) -> bytes:
    quoted = [QUESTION, ANSWER.replace('"', '""')]
    lines = [("question", "answer"), [f'"{cell}"' for cell in quoted], list(OTHER.values())]
    return "\n".join(delimiter.join(line) for line in lines).encode()


def conversation(human: str, gpt: str) -> dict[str, Any]:
    return {"conversations": [{"from": "human", "value": human}, {"from": "gpt", "value": gpt}]}


def chat(question: str, answer: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def jsonl(records: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(record) + "\n" for record in records).encode()


def in_utf16(text: bytes) -> bytes:
    return text.decode().encode("utf-16")


PAIRS = [(QUESTION, ANSWER), (OTHER["question"], OTHER["answer"])]
ALPACA = [{"instruction": q, "input": "", "output": a} for q, a in PAIRS]
FILES: dict[str, tuple[str, bytes]] = {
    "csv": ("sky.csv", table(",")),
    "csv of a spreadsheet": (
        "sky.csv",
        b"\xef\xbb\xbf" + table(";").replace(b"\n", b"\r\n").replace(b"which\r\n", b"which\n"),
    ),
    "tsv": ("sky.tsv", table("\t")),
    "csv by its content": ("sky.txt", table(",")),
    "unicode text of Excel": (
        "sky.txt",
        table("\t").replace(b"\n", b"\r\n").decode().replace("h\r", "h").encode("utf-16"),
    ),
    "csv in UTF-16, big end first": ("sky.csv", b"\xfe\xff" + table(";").decode().encode("utf-16-be")),
    "array in UTF-16": ("sky.json", in_utf16(json.dumps(rows_as_given()).encode())),
    "json lines in UTF-16": ("sky.jsonl", in_utf16(jsonl(rows_as_given()))),
    "json lines": ("sky.jsonl", jsonl(rows_as_given())),
    "json lines by their content": ("sky.data", jsonl(rows_as_given())),
    "prompt and completion": ("sky.jsonl", jsonl(rows_as_given(prompt="prompt", answer="completion"))),
    "array": ("sky.json", json.dumps(rows_as_given(answer="label")).encode()),
    "json lines in a .json": ("sky.json", jsonl(rows_as_given())),
    "array in a .jsonl": ("sky.jsonl", json.dumps(rows_as_given()).encode()),
    "openai": ("sky.jsonl", jsonl([chat(*pair) for pair in PAIRS])),
    "sharegpt": ("sky.json", json.dumps([conversation(*pair) for pair in PAIRS]).encode()),
    "sharegpt in lines": ("sky.jsonl", jsonl([conversation(*pair) for pair in PAIRS])),
    "alpaca": ("sky.json", json.dumps(ALPACA).encode()),
}


@pytest.mark.parametrize("name", FILES)
def test_the_same_two_questions_in_every_format(name: str, tmp_path: Path) -> None:
    file, content = FILES[name]
    (tmp_path / file).write_bytes(content)
    assert shown(read_task(tmp_path / file)) == EXPECTED


def test_parquet(tmp_path: Path) -> None:
    pq.write_table(pa.Table.from_pylist(rows_as_given()), tmp_path / "sky.parquet")
    assert shown(read_task(tmp_path / "sky.parquet")) == EXPECTED


def test_named_columns_pictures_and_tasks(tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    picture(0).save(tmp_path / "images" / "0.png")
    (tmp_path / "x.csv").write_text("id,ask,label,answer,photo\n7,What is it?,a cat,no,images/0.png\n,And now?,3,no,\n")
    first, second = read_task(tmp_path / "x.csv", Columns("ask", "label", "photo", "cats"))
    assert (first.id, first.task, first.answer) == ("7", "cats", "a cat")
    assert first.images == (tmp_path / "images" / "0.png",)
    assert [part["type"] for part in first.messages[0]["content"]] == ["image", "text"]
    assert (second.id, second.answer, second.images) == ("cats/2", "3", ())


@pytest.mark.parametrize("header", ["ticket,team", "question,answer"])
def test_other_data_may_have_the_columns_of_the_task(header: str, tmp_path: Path) -> None:
    path = tmp_path / "base.csv"
    path.write_text(f"{header}\nWhat is two?,2\n")
    (found,) = read_task(path, Columns("ticket", "team", task="support").of_others())
    assert (found.task, found.messages[-1]["content"][0]["text"], found.answer) == ("base", "What is two?", "2")


def test_a_file_whose_name_is_not_utf8_is_refused_or_named(tmp_path: Path) -> None:
    path = tmp_path / "caf\udce9.csv"  # b"caf\xe9.csv"
    path.write_text("question,answer\nWhat is two?,2\n")
    with pytest.raises(TaskDataError, match=r"line 2: 'task' must be Unicode, found 'caf\\udce9': is the file's name"):
        read_task(path)
    assert [each.id for each in read_task(path, Columns(task="sums"))] == ["sums/1"]


def test_a_folder_that_is_no_data_is_named_once(tmp_path: Path) -> None:
    with pytest.raises(TaskDataError, match=f"^{tmp_path}: cannot read the task data: not a regular file"):
        read_task(tmp_path)


def test_alpaca_with_an_input_and_a_system_prompt(tmp_path: Path) -> None:
    row = {"system": "Be brief.", "instruction": "Translate.", "input": "der Hund", "output": "the dog"}
    (tmp_path / "x.json").write_text(json.dumps([row]))
    (example,) = read_task(tmp_path / "x.json")
    system, user = example.messages
    assert system == {"role": "system", "content": [{"type": "text", "text": "Be brief."}]}
    assert user["content"] == [{"type": "text", "text": "Translate.\n\nder Hund"}]


@pytest.mark.parametrize(
    ("file", "content", "problem"),
    [
        ("x.csv", b"PK\x03\x04 sheet", "an Excel file or another archive: save the table as CSV"),
        ("x.xls", b"\xd0\xcf\x11\xe0", "an Excel file or another archive: save the table as CSV"),
        ("x.json", b'{"question": ["a"], "answer": ["b"]}', r"'question' must be a text, found \['a'\]"),
        ("x.csv", b"question,answer,label\na,b,c\n", r"columns answer, label could all be the answer: name it"),
        ("x.csv", b"title,answer\na,b\n", "no column is the prompt: name it with --columns prompt=NAME; there"),
        ("x.csv", b"question,answer\na,b,c\n", "line 2: expected 2 cells, found 3"),
        ("x.csv", b"question,answer\n\"a\nb\",c\nd,\n", "line 4: 'answer' must be a text, found ''"),
        ("x.csv", b"question,answer\na,caf\xe9\n", r"line 2: not UTF-8 text \(b'\\xe9'\): save it in UTF-8"),
        ("x.csv", "question,answer\na,b".encode("utf-16-le"), "x.csv: the text is UTF-16LE without a mark that says"),
        ("x.csv", b"\xff\xfeq", "x.csv: not UTF-16 text, which its mark says"),
        ("x.csv", b"question,answer\na\0,b\n", "line 2: message 1 has a NUL character, expected text and pictures: 'a"),
        ("x.jsonl", b'{"question": "a", "answer": "b\\u0000"}', "line 1: the answer has a NUL character, expected te"),
        ("x.csv", b"question,answer\ra,b\rc,d\r", "line 1: a carriage return that ends no line: expected lines that"),
        ("x.csv", b"question,answer\na,b\n\xef\xbb\xbfanswer,question\nd,c\n", "line 3: a byte order mark: two tabl"),
        ("x.csv", b"question,answer,\na,b,\nAnswer , Question,\nd,c,\n", "line 3: the columns' names again: two tab"),
        ("x.jsonl", b'{"question": "question", "answer": "answer"}', "line 1: the columns' names again"),
        ("x.csv", b"question,question\na,b\n", "line 1: the column 'question' occurs more than once"),
        ("x.csv", b"question,answer\n\"a,b\n", "not a table: unexpected end of data"),
        ("x.csv", b"question,answer,image\na,b,none.png\n", "line 2: the image .*none.png does not exist"),
        ("x.csv", b"just text", "line 1: expected JSON, Parquet, or a table with a header of at least two columns"),
        ("x.csv", b"question,answer\n", "holds no examples"),
        ("x.txt", b"", "holds no examples"),
        ("x.parquet", b"PAR1 cut", "row 1: cannot be read"),
        ("x.jsonl", b'{"messages": [{"role": "user", "content": "a"}]}', "nothing is the answer"),
        ("x.jsonl", b'{"question": "a", "answer": true}', "'answer' must be a text, found True"),
        ("x.jsonl", b'{"question": "a", "answer": "b", "image": {"bytes": "x"}}', "holds pictures, not paths"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(file: str, content: bytes, problem: str, tmp_path: Path) -> None:
    (tmp_path / file).write_bytes(content)
    with pytest.raises(TaskDataError, match=problem):
        read_task(tmp_path / file)


def test_the_first_ten_of_many_problems_are_listed(tmp_path: Path) -> None:
    """A bad picture in row 57 among them."""
    picture(0).save(tmp_path / "0.png")
    lines = ["question,answer,image"] + ["a,b,0.png"] * 80
    for at in (3, 57, *range(60, 72)):
        lines[at - 1] = "a,b,none.png" if at == 57 else "a,,0.png"
    (tmp_path / "x.csv").write_text("\n".join(lines))
    with pytest.raises(TaskDataError) as error:
        read_task(tmp_path / "x.csv")
    assert str(error.value).endswith("x.csv: 14 examples are wrong, none was used")
    first, *listed = error_line("inducekv-select", error.value).splitlines()
    assert first == f"inducekv-select: error: {error.value}"
    assert [re.findall(r"line (\d+)", line)[0] for line in listed] == [str(at) for at in (3, 57, *range(60, 68))]
    assert "none.png does not exist" in listed[1]


def test_a_file_that_would_not_fit_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (tmp_path / "x.jsonl").open("wb") as file:
        file.truncate(10 * 10**9)  # of holes
    with pytest.raises(TaskDataError, match="has 10000000000 bytes, a task's may have 4294967296: draw a sample"):
        read_task(tmp_path / "x.jsonl")


def test_without_pyarrow_parquet_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x.parquet").write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(TaskDataError, match=r"needs pyarrow: pip install 'inducekv\[data\]'"):
        read_task(tmp_path / "x.parquet")
