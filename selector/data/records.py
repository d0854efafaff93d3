"""One row of task data, in any of the layouts that people have, as a record: id, task, messages, answer.

ours             messages, answer
OpenAI           messages, of which the assistant's last with a weight that is not 0 is the answer
ShareGPT, LLaVA  conversations of turns with from and value, and perhaps such a weight
Alpaca           instruction, input, output, perhaps system
SQuAD, Dolly     context with a question, or with an instruction
plain            a column for the prompt, one for the answer, perhaps one for a picture

Any of them may have pictures, which stand where the text has <image>. Prompts and completions may be messages.
"""

from collections.abc import Mapping, Sequence
from reprlib import repr as shown
from typing import Any, Final

from inducekv_vllm.errors import TaskDataError

from .columns import ANSWERS, BY_NAME, IMAGES, PROMPTS, Columns, Row, is_empty
from .notes import Notes
from .turns import Message, last_learned, messages_of, require_no_calls, with_pictures

__all__ = ["BY_NAME", "Columns", "record_of"]

Found = tuple[Any, Any]  # messages, answer
_OF_MESSAGES: Final = ("role", "content", "weight")
_OF_TURNS: Final = ("from", "value", *_OF_MESSAGES)
_CONTEXT_FIRST: Final = {"question": True, "instruction": False}  # SQuAD, Dolly


def record_of(
    values: Mapping[str, Any], columns: Columns, number: int, task: str, place: str, notes: Notes
) -> dict[str, Any] | None:
    """The record of the row of this number; None if it is not to be learned, which `notes` is told.

    Args:
        number: with its task, the id of a row without one.
        task: the name of the task of a row without one, if `columns` has none.
        notes: is told of columns that are not used, too.

    Raises:
        TaskDataError: beginning with `place`.
    """
    columns = columns.there(values)
    row = Row(values, columns.named(), place)
    if row.is_header():
        raise TaskDataError(f"{place}: the columns' names again: two tables in one, keep each in a file of its own")
    named = columns.prompt is not None or columns.answer is not None
    if not named and isinstance(row.look("conversations"), list | tuple):
        found = _conversation(row, columns, notes)
    elif not named and "messages" in row:
        found = _chat(row, columns, notes)
    else:
        found = _plain(row, columns, notes)
    identity, own_task, also = row.get("id"), row.get("task"), row.get("also")
    if found is None:
        return None
    for name in row.unused():
        notes.unused(name)
    messages, answer = found
    task = columns.task or own_task or task
    if isinstance(identity, float) and identity.is_integer():
        identity = int(identity)  # of a column with gaps
    return {
        # Of all tasks of a bundle: a number alone would be another task's, too.
        "id": f"{task}/{number}" if identity is None or identity == "" else identity,
        "task": task,
        "messages": messages,
        "answer": answer,
        "also": also,
    }


def _chat(row: Row, columns: Columns, notes: Notes) -> Found | None:
    """Chat messages: with an answer beside them, or with the assistant's last one for an answer."""
    messages, images = row.get("messages"), _images(row, columns)
    if not isinstance(messages, list) or not messages:
        return messages, row.get("answer")
    _note_unused(messages, _OF_MESSAGES, "messages", notes)
    if "answer" in row:
        return with_pictures(messages, images, row.place), row.get("answer")
    found = _answered(messages, row.place, notes)
    return found and (with_pictures(found[0], images, row.place), found[1])


def _answered(messages: list[Any], place: str, notes: Notes) -> Found | None:
    """Messages that end with the assistant's answer, and it apart; None if no answer is to be learned."""
    if not isinstance(last := messages[-1], dict) or last.get("role") != "assistant":
        raise TaskDataError(f"{place}: neither 'answer' nor a last message of the assistant's: nothing is the answer")
    at = last_learned(messages, place)
    if at is None:
        notes.skipped(place, "its answer has the weight 0")
        return None
    answer = messages[at].get("content")
    if isinstance(answer, list):
        answer = "".join(part.get("text", "") for part in answer if isinstance(part, dict))
    if answer is None:
        require_no_calls(messages[at], at + 1, place)
    return messages[:at], answer


def _note_unused(messages: Sequence[Any], known: Sequence[str], column: str, notes: Notes) -> None:
    for name in dict.fromkeys(
        key for each in messages if isinstance(each, dict) for key in each if not is_empty(each[key])
    ):
        if name not in known:
            notes.unused(f"{column}.{name}")


def _conversation(row: Row, columns: Columns, notes: Notes) -> Found | None:
    """Turns of LLaVA or ShareGPT; the answer is the last that is to be learned."""
    images, turns = _images(row, columns), row.get("conversations")
    if len(turns) < 2:
        raise TaskDataError(f"{row.place}: 'conversations' must be a list of at least two turns")
    messages = [*_system(row), *messages_of(turns, row.place)]
    if messages[-1]["role"] != "assistant":
        raise TaskDataError(f"{row.place}: the last turn must be from 'gpt': it is the answer")
    _note_unused(turns, _OF_TURNS, "conversations", notes)
    if (found := _answered(messages, row.place, notes)) is None:
        return None
    prompt, answer = found
    return [_without_line_ends(message) for message in with_pictures(prompt, images, row.place)], answer.strip("\n")


def _plain(row: Row, columns: Columns, notes: Notes) -> Found | None:
    """A prompt and an answer, each in a column."""
    prompt = columns.prompt or row.only(PROMPTS, "prompt")
    answer = columns.answer or _answer_column(row)
    images = _images(row, columns)
    if _are_messages(row.look(prompt)):
        messages = [*_system(row), *row.get(prompt)]
    else:
        messages = [*_system(row), {"role": "user", "content": _question(row, prompt)}]
    messages = with_pictures(messages, images, row.place, anywhere=True)
    if _are_messages(row.look(answer)):
        found = _answered(row.get(answer), row.place, notes)
        return found and (messages, found[1])
    return messages, _first_answer(row) if answer == "answers" else row.text(answer)


def _are_messages(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(each, dict) for each in value)


def _question(row: Row, prompt: str) -> str:
    """The prompt's text, with Alpaca's input behind its instruction, and a context where its format has it."""
    text = row.text(prompt)
    if prompt == "instruction" and not is_empty(row.look("input")):
        text = f"{text}\n\n{row.text('input')}"
    context = row.look("context")
    if prompt in _CONTEXT_FIRST and isinstance(context, str) and context.strip():
        context = row.text("context")
        text = f"{context}\n\n{text}" if _CONTEXT_FIRST[prompt] else f"{text}\n\n{context}"
    return text


def _answer_column(row: Row) -> str:
    """The column of the answer, by its name."""
    names = [name for name in ANSWERS if name in row]
    if not names and "answers" in row:
        return "answers"
    if not names and "chosen" in row and "rejected" in row:
        raise TaskDataError(
            f"{row.place}: preferences ('chosen', 'rejected') cannot be learned as such: --columns answer=chosen "
            "learns the chosen answers, and nothing of the others"
        )
    return row.only(names or ANSWERS, "answer")


def _first_answer(row: Row) -> str:
    """SQuAD's answers: the first of their texts."""
    answers = row.get("answers")
    texts = answers.get("text") if isinstance(answers, dict) else answers
    if not isinstance(texts, list) or not texts or not isinstance(texts[0], str) or not texts[0].strip():
        raise TaskDataError(f"{row.place}: 'answers' must have a first text, found {shown(answers)}")
    return texts[0]


def _system(row: Row) -> list[Message]:
    """The row's own system prompt as messages; none without one."""
    if not isinstance(row.look("system"), str) or not row.look("system"):
        return []
    return [{"role": "system", "content": row.get("system")}]


def _images(row: Row, columns: Columns) -> list[Any]:
    """The pictures of a row: of the column that is named, or the first known one that has some."""
    column = columns.image or next((name for name in IMAGES if not is_empty(row.look(name))), None)
    return [] if column is None else row.images(column)


def _without_line_ends(message: Message) -> Message:
    """A turn of LLaVA's as its parts, which have line ends around their pictures."""
    content = message["content"]
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    kept = [
        part if part["type"] != "text" else {"type": "text", "text": part["text"].strip("\n")}
        for part in parts
        if part["type"] != "text" or part["text"].strip()
    ]
    return {"role": message["role"], "content": kept}
