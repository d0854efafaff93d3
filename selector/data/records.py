"""One row of task data, in any of the layouts that people have, as a record: id, task, messages, answer.

ours             messages, answer
OpenAI           messages, the last of which is the assistant's
ShareGPT, LLaVA  conversations of turns with from and value; LLaVA has image, and <image> in the text
Alpaca           instruction, input, output, perhaps system
plain            a column for the prompt, one for the answer, perhaps one for a picture
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from reprlib import repr as shown
from typing import Any, Final

from inducekv_vllm.errors import TaskDataError

_ROLES: Final = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
}
_MARK: Final = "<image>"  # of LLaVA
PROMPTS: Final = ("prompt", "question", "query", "instruction")
ANSWERS: Final = ("answer", "completion", "response", "output", "label", "target")
IMAGES: Final = ("image", "images", "image_path")


@dataclass(frozen=True)
class Columns:
    """Which columns hold what, where it is not to be found by their names."""

    prompt: str | None = None
    answer: str | None = None
    image: str | None = None
    task: str | None = None  # the task's name, of rows that have none


BY_NAME: Final = Columns()


def record_of(row: Mapping[str, Any], columns: Columns, number: int, task: str, place: str) -> dict[str, Any]:
    """The record of the row of this number. Raises TaskDataError, beginning with `place`.

    Args:
        number: with its task, the id of a row without one.
        task: the name of the task of a row without one, if `columns` has none.
    """
    named = columns.prompt is not None or columns.answer is not None
    if not named and isinstance(row.get("conversations"), list | tuple):
        messages, answer = _conversation(row, place)
    elif not named and "messages" in row:
        messages, answer = _chat(row, place)
    else:
        messages, answer = _plain(row, columns, place)
    identity, task = row.get("id"), columns.task or row.get("task") or task
    return {
        # Of all tasks of a bundle: a number alone would be another task's, too.
        "id": f"{task}/{number}" if identity is None or identity == "" else identity,
        "task": task,
        "messages": messages,
        "answer": answer,
    }


def _chat(row: Mapping[str, Any], place: str) -> tuple[Any, Any]:
    """Chat messages: with an answer beside them, or with the assistant's last one for an answer."""
    messages = row["messages"]
    if "answer" in row or not isinstance(messages, list) or not messages:
        return messages, row.get("answer")
    last = messages[-1]
    if not isinstance(last, dict) or last.get("role") != "assistant":
        raise TaskDataError(f"{place}: neither 'answer' nor a last message of the assistant's: nothing is the answer")
    answer = last.get("content")
    if isinstance(answer, list):
        answer = "".join(part.get("text", "") for part in answer if isinstance(part, dict))
    return messages[:-1], answer


def _conversation(row: Mapping[str, Any], place: str) -> tuple[list[dict[str, Any]], str]:
    """Turns of LLaVA or ShareGPT; the answer is the last."""
    images, turns = _images(row, "image", place), row["conversations"]
    if len(turns) < 2:
        raise TaskDataError(f"{place}: 'conversations' must be a list of at least two turns")
    messages = _system(row)
    for turn in turns:
        speaker = turn.get("from") if isinstance(turn, dict) else None
        role = _ROLES.get(speaker) if isinstance(speaker, str) else None
        if role is None or not isinstance(turn.get("value"), str):
            raise TaskDataError(f"{place}: each turn needs 'from' (human, gpt or system) and a text 'value'")
        content: list[dict[str, Any]] = []
        for number, piece in enumerate(turn["value"].split(_MARK)):
            if number:
                if not images:
                    raise TaskDataError(f"{place}: more {_MARK} marks than images")
                content.append({"type": "image", "image": images.pop(0)})
            if piece.strip():
                content.append({"type": "text", "text": piece.strip("\n")})
        messages.append({"role": role, "content": content})
    if images:
        raise TaskDataError(f"{place}: {len(images)} images have no {_MARK} mark in the conversation")
    if messages[-1]["role"] != "assistant":
        raise TaskDataError(f"{place}: the last turn must be from 'gpt': it is the answer")
    return messages, "".join(part.get("text", "") for part in messages.pop()["content"])


def _plain(row: Mapping[str, Any], columns: Columns, place: str) -> tuple[list[dict[str, Any]], str]:
    """A prompt and an answer, each in a column. Alpaca's input goes behind its instruction."""
    prompt = columns.prompt or _only(row, PROMPTS, "prompt", place)
    answer = columns.answer or _only(row, ANSWERS, "answer", place)
    image = columns.image or next((name for name in IMAGES if row.get(name)), None)
    text = _text(row, prompt, place)
    if prompt == "instruction" and row.get("input"):
        text = f"{text}\n\n{_text(row, 'input', place)}"
    pictures = [] if image is None else _images(row, image, place)
    content = [*({"type": "image", "image": path} for path in pictures), {"type": "text", "text": text}]
    system = (
        [{"role": "system", "content": row["system"]}] if isinstance(row.get("system"), str) and row["system"] else []
    )
    return [*system, {"role": "user", "content": content}], _text(row, answer, place)


def _system(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The row's own system prompt as messages; none without one."""
    system = row.get("system")
    return [{"role": "system", "content": system}] if isinstance(system, str) and system else []


def _only(row: Mapping[str, Any], names: Sequence[str], what: str, place: str) -> str:
    """The one column of these that the row has. Raises TaskDataError: it has none, or several."""
    found = [name for name in names if name in row]
    if len(found) == 1:
        return found[0]
    problem = f"the columns {', '.join(found)} could all be the {what}" if found else f"no column is the {what}"
    raise TaskDataError(f"{place}: {problem}: name it with --{what}-column; there are {', '.join(map(str, row))}")


def _text(row: Mapping[str, Any], column: str, place: str) -> str:
    if column not in row:
        raise TaskDataError(f"{place}: there is no column {column!r}, there are {', '.join(map(str, row))}")
    value = row[column]
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, str) or not value.strip():
        raise TaskDataError(f"{place}: {column!r} must be a text, found {shown(value)}")
    return value


def _images(row: Mapping[str, Any], column: str, place: str) -> list[Any]:
    """Paths. Raises TaskDataError: there is no such column, or pictures lie in the file itself."""
    if column not in row and column not in IMAGES:
        raise TaskDataError(f"{place}: there is no column {column!r}, there are {', '.join(map(str, row))}")
    value = row.get(column)
    found = list(value) if isinstance(value, list | tuple) else [] if value is None or value == "" else [value]
    if any(isinstance(each, dict | bytes) for each in found):
        raise TaskDataError(
            f"{place}: {column!r} holds pictures, not paths: write them to files beside this one, and their paths here"
        )
    return found
