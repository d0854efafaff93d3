"""Pictures and questions as the chat messages an HTTP client sends: the picture travels inside the request."""

from __future__ import annotations

import base64
import io
import mimetypes
from typing import Any

import numpy as np
from PIL import Image

from selector.data.examples import Example

Message = dict[str, Any]


def user_turn(pixels: np.ndarray, text: str) -> Message:
    """One user message: a picture (`[height, width, 3] uint8`), then text."""
    png = io.BytesIO()
    Image.fromarray(pixels).save(png, "PNG")
    return {"role": "user", "content": [_picture("image/png", png.getvalue()), {"type": "text", "text": text}]}


def messages_of(example: Example) -> list[Message]:
    """The prompt of a task example; its pictures' files go as they are, in the places where the example has them."""
    paths = iter(example.images)

    def part(content: dict[str, Any]) -> dict[str, Any]:
        if content["type"] != "image":
            return content
        path = next(paths)
        return _picture(mimetypes.guess_type(path.name)[0] or "image/png", path.read_bytes())

    return [{**message, "content": [part(content) for content in message["content"]]} for message in example.messages]


def _picture(media_type: str, data: bytes) -> dict[str, Any]:
    """A content part that holds the picture itself."""
    return {"type": "image_url", "image_url": {"url": f"data:{media_type};base64,{base64.b64encode(data).decode()}"}}


def question_of(record: dict[str, Any]) -> str:
    """The text of a task record of the demo world, whose one message holds a picture and then the question."""
    return str(record["messages"][0]["content"][1]["text"])


def normalise_answer(text: str) -> str:
    """Lower case, without surrounding space and final punctuation."""
    return text.strip().lower().rstrip(".!?").strip()


def same_answer(answer: str, expected: str) -> bool:
    """Exact match of the normalised answers."""
    return normalise_answer(answer) == normalise_answer(expected)


def chat_body(model: str, messages: list[dict[str, Any]], output_tokens: int, xargs: dict[str, Any]) -> dict[str, Any]:
    """A request for exactly `output_tokens` tokens, every one of them visible in the stream."""
    return {
        "model": model,
        "messages": messages,
        "temperature": 0.0,
        "max_tokens": output_tokens,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,  # a token whose text is not yet printable has no text in its chunk
        **({"vllm_xargs": xargs} if xargs else {}),
    }
