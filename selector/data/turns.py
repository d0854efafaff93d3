"""Turns of a conversation: who speaks, which answers are learned, and where pictures stand."""

from collections.abc import Mapping, Sequence
from reprlib import repr as shown
from typing import Any, Final

from inducekv_vllm.bundle.plain_text import PICTURE_MARK, found_beside_text
from inducekv_vllm.errors import TaskDataError

Message = dict[str, Any]
# By the names of OpenAI's chats, whose developer messages are what system messages were before.
ROLES: Final = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
# And of ShareGPT's and LLaVA's.
SPEAKERS: Final = {**ROLES, "human": "user", "gpt": "assistant", "chatgpt": "assistant"}
_TOOLS: Final = ("tool", "tool_call", "tool_response", "function", "function_call", "observation")


def role_of(name: Any, known: Mapping[str, str], number: int, place: str) -> str:
    """The role of the message of this number. Raises TaskDataError: it is not one of the known."""
    if isinstance(name, str) and name in known:
        return known[name]
    why = ": calls of tools and their results cannot be learned" if name in _TOOLS else ""
    raise TaskDataError(
        f"{place}: message {number} has the role {shown(name)}{why}; expected one of {', '.join(known)}"
    )


def require_no_calls(message: Mapping[str, Any], number: int, place: str) -> None:
    """Raises TaskDataError: a message without a text calls tools."""
    for name in ("tool_calls", "function_call"):
        if message.get(name):
            raise TaskDataError(f"{place}: message {number} is a call of tools ({name!r}), which cannot be learned")


def messages_of(turns: Sequence[Any], place: str) -> list[Message]:
    """Turns of ShareGPT or LLaVA as messages. Raises TaskDataError: a turn has no speaker or no text."""
    messages = []
    for number, turn in enumerate(turns, start=1):
        if not isinstance(turn, dict) or not isinstance(text := turn.get("value", turn.get("content")), str):
            raise TaskDataError(f"{place}: each turn needs 'from' and a text 'value', found {shown(turn)}")
        role = role_of(turn.get("from", turn.get("role")), SPEAKERS, number, place)
        messages.append({"role": role, "content": text, "weight": turn.get("weight")})
    return messages


def require_text(text: str, what: str, expected: str, place: str) -> None:
    """Raises TaskDataError: something else than text is in it."""
    if (found := found_beside_text(text)) is not None:
        raise TaskDataError(f"{place}: {what} has {found}, expected {expected}: {shown(text)}")


def last_learned(messages: Sequence[Any], place: str) -> int | None:
    """Which message is the last answer to be learned: of the assistant's, with a weight other than OpenAI's 0."""
    found = None
    for at, message in enumerate(messages):
        if not isinstance(message, dict) or message.get("role") != "assistant":
            continue
        weight = message.get("weight")
        if weight not in (None, 0, 1):
            raise TaskDataError(f"{place}: message {at + 1} has the weight {shown(weight)}; expected 0 or 1")
        if weight != 0:
            found = at
    return found


def with_pictures(messages: Any, images: Sequence[Any], place: str, *, anywhere: bool = False) -> Any:
    """The messages with the images where their texts have `PICTURE_MARK`, and in image parts that name none.

    Args:
        anywhere: images of which no text has a mark go before the last message's text.

    Raises:
        TaskDataError: there are more marks than images, or images without a mark.
    """
    remaining = list(images)
    placed = [_placed(message, remaining, place) for message in messages]
    if remaining and len(remaining) == len(images) and anywhere:
        return [*placed[:-1], _before_text(placed[-1], remaining)]
    if remaining:
        raise TaskDataError(f"{place}: {len(remaining)} images have no {PICTURE_MARK} mark in the conversation")
    return placed


def _placed(message: Any, remaining: list[Any], place: str) -> Any:
    """A message with its pictures, which are taken from `remaining`; one without marks as it is."""
    content = message.get("content") if isinstance(message, dict) else None
    if isinstance(content, str) and PICTURE_MARK in content:
        return message | {"content": _parts(content, remaining, place)}
    if not isinstance(content, list):
        return message
    parts: list[Any] = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "text" and PICTURE_MARK in str(part.get("text")):
            parts += _parts(str(part["text"]), remaining, place)
        elif kind == "image" and remaining and part.get("image") is None:
            parts.append({"type": "image", "image": remaining.pop(0)})
        else:
            parts.append(part)
    return message | {"content": parts}


def _parts(text: str, remaining: list[Any], place: str) -> list[Message]:
    """A text with marks as parts; line ends around pictures go."""
    parts: list[Message] = []
    for number, piece in enumerate(text.split(PICTURE_MARK)):
        if number:
            if not remaining:
                raise TaskDataError(f"{place}: more {PICTURE_MARK} marks than images")
            parts.append({"type": "image", "image": remaining.pop(0)})
        if piece.strip():
            parts.append({"type": "text", "text": piece.strip("\n")})
    return parts


def _before_text(message: Message, images: Sequence[Any]) -> Message:
    content = message["content"]
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    return message | {"content": [*({"type": "image", "image": path} for path in images), *parts]}
