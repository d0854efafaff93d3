"""Files as people have them: nothing of theirs is dropped or learned against its meaning without a word."""

import json
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet as pq
import pytest

from inducekv_vllm.errors import TaskDataError
from selector.api import read
from selector.data.choice import hold_out
from selector.data.examples import Example, read_task
from selector.data.notes import TaskDataWarning
from selector.data.records import Columns
from selector.data.repeats import distinct
from tests.tiny_models import picture

USER = {"role": "user", "content": "Which colour?"}


def said(text: Any, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text} | more


def turn(speaker: str, text: str, **more: Any) -> dict[str, Any]:
    return {"from": speaker, "value": text} | more


def written(folder: Path, rows: list[dict[str, Any]], name: str = "x.jsonl") -> Path:
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / name


def text_of(example: Example) -> str:
    return "|".join(part.get("text", "PICTURE") for message in example.messages for part in message["content"])


def asked_and_answered(examples: list[Example]) -> list[tuple[str, str]]:
    return [(text_of(example), example.answer) for example in examples]


# ---- Answers that are not to be learned --------------------------------------------------------------------------


CHATS: list[list[dict[str, Any]]] = [
    [USER, said("red", weight=0)],
    [USER, said("red", weight=0), {"role": "user", "content": "No."}, said("blue", weight=1)],
    [USER, said("green"), {"role": "user", "content": "Sure?"}, said("no", weight=0)],
]


@pytest.mark.parametrize("of", ["openai", "sharegpt"])
def test_an_answer_of_weight_0_is_not_learned(of: str, tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"messages": chat} for chat in CHATS]
    if of == "sharegpt":
        names = {"user": "human", "assistant": "gpt"}
        turns = [[turn(names[m["role"]], m["content"], weight=m.get("weight")) for m in chat] for chat in CHATS]
        rows = [{"conversations": each} for each in turns]
    path = written(tmp_path, rows)
    with pytest.warns(
        TaskDataWarning, match=r"x.jsonl: 1 row is left out, because its answer has the weight 0: .* line 1"
    ):
        examples = read_task(path)
    assert asked_and_answered(examples) == [("Which colour?|red|No.", "blue"), ("Which colour?", "green")]


def test_what_marks_a_turn_otherwise_is_named(tmp_path: Path) -> None:
    turns = [turn("human", "a"), turn("gpt", "b", train=False)]
    with pytest.warns(TaskDataWarning, match=r"a column is not used: 'conversations.train' \(1 row\)"):
        read_task(written(tmp_path, [{"conversations": turns}]))


def test_preferences_are_learned_only_if_asked_for(tmp_path: Path) -> None:
    path = written(tmp_path, [{"prompt": "a", "chosen": [USER, said("good")], "rejected": [USER, said("bad")]}])
    with pytest.raises(TaskDataError, match=r"line 1: preferences \('chosen', 'rejected'\) cannot be learned as such"):
        read_task(path)
    with pytest.warns(TaskDataWarning, match=r"a column is not used: 'rejected' \(1 row\)"):
        assert asked_and_answered(read_task(path, Columns(answer="chosen"))) == [("a", "good")]


def test_prompts_and_completions_may_be_messages(tmp_path: Path) -> None:
    path = written(tmp_path, [{"prompt": [USER], "completion": [said("red")]}])
    assert asked_and_answered(read_task(path)) == [("Which colour?", "red")]


# ---- Columns -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("row", "prompt"),
    [
        (
            {"context": "The sky is blue.", "question": "Which?", "answers": {"text": ["x"]}},
            "The sky is blue.\n\nWhich?",
        ),
        ({"instruction": "Sum up.", "context": "Long.", "response": "x", "category": ""}, "Sum up.\n\nLong."),
        ({"instruction": "Go on.", "input": "c", "output": "x"}, "Go on.\n\nc"),
        ({"Question": "Which?", "ANSWER ": "x"}, "Which?"),
    ],
    ids=["squad", "dolly", "alpaca", "capitals"],
)
@pytest.mark.filterwarnings("error")
def test_columns_that_a_format_defines_are_used(row: dict[str, Any], prompt: str, tmp_path: Path) -> None:
    assert asked_and_answered(read_task(written(tmp_path, [row]))) == [(prompt, "x")]


@pytest.mark.parametrize(
    ("row", "named"),
    [
        ({"prompt": "a", "input": "b", "answer": "c"}, "'input'"),
        ({"prompt": "a", "Context": "b", "answer": "c"}, "'Context'"),
        ({"messages": [USER, said("red")], "tools": [{"name": "f"}]}, "'tools'"),
        ({"messages": [USER | {"name": "Ann"}, said("red")]}, "'messages.name'"),
        ({"conversations": [turn("human", "a"), turn("gpt", "b")], "tools": "[]"}, "'tools'"),
        ({"question": "a", "answer": "b", "system": {"text": "c"}}, "'system'"),
        ({"question": "a", "answer": "b", "weight": 0}, "'weight'"),
    ],
)
def test_every_column_that_is_not_used_is_named(row: dict[str, Any], named: str, tmp_path: Path) -> None:
    with pytest.warns(TaskDataWarning, match=rf"x.jsonl: a column is not used: {named} \(1 row\)"):
        read_task(written(tmp_path, [row]))


@pytest.mark.filterwarnings("error")
def test_empty_columns_are_not_worth_a_warning(tmp_path: Path) -> None:
    read_task(written(tmp_path, [{"question": "a", "answer": "b", "tools": None, "history": [], "split": ""}]))


def test_the_counts_of_unused_columns(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text(",question,answer,team\n0,a,b,x\n1,c,d,\n")
    with pytest.warns(TaskDataWarning, match=r"2 columns are not used: 'column 1' \(2 rows\), 'team' \(1 row\)"):
        read_task(tmp_path / "x.csv")


# ---- Pictures ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [{"role": "user", "content": "A <image> B"}, said("x")], "images": ["0.png"]},
        {"messages": [{"role": "user", "content": "A <image> B"}], "answer": "x", "image": "0.png"},
        {"conversations": [turn("human", "A <image> B"), turn("gpt", "x")], "images": ["0.png"]},
        {"instruction": "A <image> B", "output": "x", "images": ["0.png"]},
    ],
    ids=["openai", "ours", "sharegpt", "alpaca"],
)
@pytest.mark.filterwarnings("error")
def test_pictures_beside_a_text_stand_where_it_marks_them(row: dict[str, Any], tmp_path: Path) -> None:
    picture(0).save(tmp_path / "0.png")
    (example,) = read_task(written(tmp_path, [row]))
    assert (text_of(example), example.images) == ("A |PICTURE| B", (tmp_path / "0.png",))
    row.pop("images", None), row.pop("image", None)
    with pytest.raises(TaskDataError, match="line 1: more <image> marks than images"):
        read_task(written(tmp_path, [row]))


@pytest.mark.parametrize(
    ("question", "answer", "problem"),
    [
        ("a", "b <image>", "the answer has the mark <image>, expected text alone: 'b <image>'"),
        ("a", "<audio>", "the answer has the mark <audio>, expected text alone"),
        ("<video>a", "b", "message 1 has the mark <video>, expected text and pictures: '<video>a'"),
    ],
)
def test_marks_of_what_cannot_be_learned_are_refused(question: str, answer: str, problem: str, tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"question": question, "answer": answer},
        {"messages": [{"role": "user", "content": question}], "answer": answer},
        {"messages": [{"role": "user", "content": question}, said(answer)]},
        {"conversations": [turn("human", question), turn("gpt", answer)]},
    ]
    for row in rows:
        with pytest.raises(TaskDataError, match=f"line 1: {problem}"):
            read_task(written(tmp_path, [row]))


def test_image_parts_without_a_path_take_those_beside_them(tmp_path: Path) -> None:
    picture(0).save(tmp_path / "0.png")
    content = [{"type": "image"}, {"type": "text", "text": "Which?"}]
    row = {"messages": [{"role": "user", "content": content}, said("x")], "images": ["0.png"]}
    (example,) = read_task(written(tmp_path, [row]))
    assert text_of(example) == "PICTURE|Which?"


# ---- Values ------------------------------------------------------------------------------------------------------


def test_numbers_of_columns_with_gaps(tmp_path: Path) -> None:
    """As pandas writes them: integers as floats, gaps as NaN."""
    table = pa.table({"id": [7.0, None], "question": ["a", "b"], "answer": pa.array([1.0, 2.5]), "note": [None, None]})
    pq.write_table(table, tmp_path / "x.parquet")
    examples = read_task(tmp_path / "x.parquet")
    assert [(example.id, example.answer) for example in examples] == [("7", "1"), ("x/2", "2.5")]
    for gap in (float("nan"), None):
        pq.write_table(pa.table({"question": ["a", "b"], "answer": [1.0, gap]}), tmp_path / "x.parquet")
        with pytest.raises(TaskDataError, match=r"row 2: 'answer' must be a text, found (nan|None)"):
            read_task(tmp_path / "x.parquet")
    (tmp_path / "x.jsonl").write_text('{"question": "a", "answer": NaN}')
    with pytest.raises(TaskDataError, match="line 1: 'answer' must be a text, found None"):
        read_task(tmp_path / "x.jsonl")


def labelled(answers: list[int]) -> pa.Table:
    """Answers as numbers of classes, with what `datasets` writes about them."""
    features = {"text": {"_type": "Value"}, "answer": {"names": ["negative", "positive"], "_type": "ClassLabel"}}
    table = pa.table({"question": [f"q{number}" for number in range(len(answers))], "answer": answers})
    return table.replace_schema_metadata({b"huggingface": json.dumps({"info": {"features": features}})})


def test_labels_are_learned_by_their_names(tmp_path: Path) -> None:
    pq.write_table(labelled([1, 0, 1]), tmp_path / "x.parquet")
    assert [each.answer for each in read_task(tmp_path / "x.parquet")] == ["positive", "negative", "positive"]


@pytest.mark.parametrize(("number", "problem"), [(-1, "must be a text, found None"), (2, "is the class 2, .* are 2")])
def test_labels_without_a_name_are_refused(number: int, problem: str, tmp_path: Path) -> None:
    pq.write_table(labelled([number]), tmp_path / "x.parquet")
    with pytest.raises(TaskDataError, match=f"row 1: 'answer' {problem}"):
        read_task(tmp_path / "x.parquet")


def test_a_dataset_in_memory_has_its_names_too() -> None:
    class Labels:
        names = ("negative", "positive")

    class Dataset(list[dict[str, Any]]):
        features: ClassVar = {"answer": Labels(), "question": object()}

    assert [example.answer for example in read(Dataset([{"question": "a", "answer": 1}]))] == ["positive"]
    with pytest.raises(TaskDataError, match="row 1: expected a dictionary of columns, found 'question'"):
        read(["question"])  # what iterating over a pandas.DataFrame gives
    with pytest.raises(TaskDataError, match=r"row 1: expected a dictionary of columns, found \('a', 'b'\)"):
        read([("a", "b")])  # type: ignore[list-item]


# ---- Rows that say the same, or contradict each other ------------------------------------------------------------


def test_repeated_and_contradicting_rows(tmp_path: Path) -> None:
    pairs = [("a", "1"), ("b", "2"), ("a", "1"), ("b", "3"), ("c", "4"), ("a", "1 ")]
    examples = read_task(written(tmp_path, [{"question": q, "answer": a} for q, a in pairs]))
    with pytest.warns(TaskDataWarning) as warned:
        kept = distinct(examples)
    assert asked_and_answered(kept) == [("a", "1"), ("b", "2"), ("b", "3"), ("c", "4")]
    repeats, contradictions = [str(each.message) for each in warned]
    x = tmp_path / "x.jsonl"
    assert repeats == (
        f"2 rows repeat an earlier one, and equal rows are learned once: the first is {x}, line 3, like {x}, line 1"
    )
    assert contradictions == (
        "1 question has several answers, which contradict each other and are all learned: "
        f"the first is {x}, line 2 ('2') and {x}, line 4 ('3')"
    )


@pytest.mark.parametrize("seed", range(8))
def test_equal_questions_are_on_one_side(seed: int, tmp_path: Path) -> None:
    rows = [{"question": f"q{number % 15}", "answer": str(number)} for number in range(30)]
    training, validation = hold_out(read_task(written(tmp_path, rows)), seed)
    assert (len(training), len(validation)) == (26, 4)
    assert not {each.source_digest for each in training} & {each.source_digest for each in validation}


def test_one_question_cannot_be_split(tmp_path: Path) -> None:
    examples = read_task(written(tmp_path, [{"question": "q", "answer": answer} for answer in "ab"]))
    with pytest.raises(TaskDataError, match="all 2 examples ask the same one"):
        hold_out(examples, 0)


# ---- Files -------------------------------------------------------------------------------------------------------

ROWS = [{"question": "a", "answer": "b"}, {"question": "c", "answer": "d"}]


@pytest.mark.parametrize("name", ["x.json", "x.jsonl", "x.txt"])
@pytest.mark.parametrize("begin", ["", "\ufeff", "\n"])
def test_json_over_many_lines(begin: str, name: str, tmp_path: Path) -> None:
    documents = {
        "array": json.dumps(ROWS, indent=2),
        "objects": "\n".join(json.dumps(row, indent=2) for row in ROWS),
        "object": json.dumps(ROWS[0], indent=2),
    }
    for text in documents.values():
        (tmp_path / name).write_text(begin + text, encoding="utf-8")
        assert asked_and_answered(read_task(tmp_path / name)) == [("a", "b"), ("c", "d")][: text.count("question")]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('{\n "question": "a",\n "answer": \n}', "item 1: malformed JSON: Expecting value"),
        ('{\n "data": [\n {"q": 1}\n ]\n}', "if the rows are the list in 'data', write that list to a file of its own"),
        ('{"question": "a", "answer": }\n{"question": "a", "answer": "b"}\n', "line 1: malformed JSON"),
    ],
)
def test_a_malformed_document_is_one_error(text: str, problem: str, tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(TaskDataError, match=problem) as error:
        read_task(tmp_path / "x.json")
    assert not error.value.problems


@pytest.mark.parametrize(
    "content",
    [
        "sep=;\r\nQuestion;Answer\r\na;b\r\nc;d\r\n",
        "\ufeffsep=;\nquestion;answer\na;b\nc;d\n",
        '"sep=|"\nquestion|answer\na|b\nc|d\n',
        "question;answer\na;b\n;\nc;d\n;\n",
        '"question";"answer";"one, two, three"\na;b;\nc;d;\n',
        "Question,Answer,,\na,b,,\nc,d,,\n",
    ],
)
@pytest.mark.filterwarnings("error")
def test_tables_of_spreadsheets(content: str, tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text(content, encoding="utf-8")
    assert asked_and_answered(read_task(tmp_path / "x.csv")) == [("a", "b"), ("c", "d")]


def test_lines_are_counted_below_what_excel_writes_first(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("sep=;\nquestion;answer\na;b\nc\n")
    with pytest.raises(TaskDataError, match="line 4: expected 2 cells, found 1"):
        read_task(tmp_path / "x.csv")


# ---- Roles -------------------------------------------------------------------------------------------------------


def test_openais_developer_is_the_system(tmp_path: Path) -> None:
    row = {"messages": [{"role": "developer", "content": "Be brief."}, USER, said("red")]}
    (example,) = read_task(written(tmp_path, [row]))
    assert [message["role"] for message in example.messages] == ["system", "user"]


@pytest.mark.parametrize("role", ["tool", "function", "observation", "function_call"])
def test_roles_of_tools_are_refused_by_name(role: str, tmp_path: Path) -> None:
    told = (
        rf"line 1: message 2 has the role '{role}': calls of tools and their results cannot be learned; expected one of"
    )
    with pytest.raises(TaskDataError, match=told):
        read_task(written(tmp_path, [{"messages": [USER, {"role": role, "content": "3"}, USER, said("red")]}]))
    turns = [turn("human", "a"), turn(role, "b"), turn("human", "c"), turn("gpt", "d")]
    with pytest.raises(TaskDataError, match=told):
        read_task(written(tmp_path, [{"conversations": turns}]))


@pytest.mark.parametrize("name", ["tool_calls", "function_call"])
def test_calls_of_tools_are_refused_by_name(name: str, tmp_path: Path) -> None:
    call = said(None, **{name: [{"id": "1"}]})
    for messages in ([USER, call], [USER, call, USER, said("red")]):
        with pytest.raises(TaskDataError, match=rf"line 1: message 2 is a call of tools \('{name}'\)"):
            read_task(written(tmp_path, [{"messages": messages}]))


# ---- Others ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"messages": [USER, said("red", weight=0.5)]}, "line 1: message 2 has the weight 0.5; expected 0 or 1"),
        ({"messages": [USER, said("x")], "images": ["0.png"]}, "1 images have no <image> mark"),
        ({"question": "a", "answer": "b", "also": ["x" * 101]}, "in 'also' must have 1 to 100 bytes, found 101"),
        ({"question": "a", "answer": "b", "also": [""]}, "a wording in 'also' must have 1 to 100 bytes, found 0"),
        ({"question": "a", "answer": "b", "also": ["x"] * 33}, "line 1: 'also' may have 32 wordings, found 33"),
    ],
)
def test_rows_that_are_refused(row: dict[str, Any], problem: str, tmp_path: Path) -> None:
    """Wordings that no fact can have are, too, and not when facts are tried, after the gate's fit."""
    with pytest.raises(TaskDataError, match=problem):
        read_task(written(tmp_path, [row]))
