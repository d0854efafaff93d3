"""Chat messages as a model's template takes them: content as a list of parts, or as one string.

vLLM reads from the template's source which of the two it takes (`--chat-template-content-format auto`), and joins the
text parts of a message by line breaks if it takes a string, after the marks of its pictures, a line each. Prompts must
be the same here.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import TemplateError

from ..errors import TaskDataError

_PROBE = "a text that no template contains"


def takes_parts(processor: Any) -> bool:
    """Whether the chat template of a processor or tokenizer prints the text of a list of parts."""
    parts = [{"type": "text", "text": _PROBE}]
    try:
        text: str = processor.apply_chat_template([{"role": "user", "content": parts}], tokenize=False)
    except (TypeError, ValueError, AttributeError, TemplateError):
        return False  # it wants a string
    return _PROBE in text and str(parts) not in text and json.dumps(parts) not in text  # not the list made a string


def picture_mark(processor: Any) -> str | None:
    """What a template of strings gets for a picture; None: it can have none."""
    return getattr(processor, "picture_mark", None)


def with_text_content(messages: Sequence[Mapping[str, Any]], mark: str | None = None) -> list[dict[str, Any]]:
    """The messages with each content as one string: a mark for each picture, then its text parts, a line each."""

    def joined(parts: Sequence[Mapping[str, Any]]) -> str:
        pictures = [mark for part in parts if part["type"] == "image" and mark is not None]
        return "\n".join([*pictures, *[part["text"] for part in parts if part["type"] == "text"]])

    return [dict(message) | {"content": joined(message["content"])} for message in messages]


def chat_text(processor: Any, messages: Sequence[Mapping[str, Any]], *, as_parts: bool, generation_prompt: bool) -> str:
    """Messages as the chat template of a processor or tokenizer writes them, a picture as its mark.

    Args:
        as_parts: what `takes_parts` says of the template.

    Raises:
        TaskDataError: the template refuses the messages.
    """
    try:
        text: str = processor.apply_chat_template(
            list(messages) if as_parts else with_text_content(messages, picture_mark(processor)),
            add_generation_prompt=generation_prompt,
            tokenize=False,
        )
    except (ValueError, TypeError, KeyError, AttributeError, TemplateError) as error:
        raise TaskDataError(f"the model's chat template refuses the messages: {error}") from error
    return text
