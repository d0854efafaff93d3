"""Chat messages as a model's template takes them: content as a list of parts, or as one string.

vLLM reads from the template's source which of the two it takes (`--chat-template-content-format auto`), and joins the
text parts of a message by line breaks if it takes a string. Prompts must be the same here.
"""

from __future__ import annotations

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


def with_text_content(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages, which have text parts only, with each content as one string: its parts joined by line breaks."""
    return [dict(message) | {"content": "\n".join(part["text"] for part in message["content"])} for message in messages]


def chat_text(processor: Any, messages: Sequence[Mapping[str, Any]], *, as_parts: bool, generation_prompt: bool) -> str:
    """Messages as the chat template of a processor or tokenizer writes them, a picture as its mark.

    Args:
        as_parts: what `takes_parts` says of the template.

    Raises:
        TaskDataError: the template refuses the messages.
    """
    try:
        text: str = processor.apply_chat_template(
            list(messages) if as_parts else with_text_content(messages),
            add_generation_prompt=generation_prompt,
            tokenize=False,
        )
    except (ValueError, TypeError, KeyError, AttributeError, TemplateError) as error:
        raise TaskDataError(f"the model's chat template refuses the messages: {error}") from error
    return text
