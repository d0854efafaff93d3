"""Pictures and questions as the chat messages an HTTP client sends: the picture travels inside the request."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
from PIL import Image

from selector.client import Message, messages_of, picture_part

__all__ = ["Message", "chat_body", "messages_of", "normalise_answer", "question_of", "same_answer", "user_turn"]


def user_turn(pixels: np.ndarray, text: str) -> Message:
    """One user message: a picture (`[height, width, 3] uint8`), then text."""
    png = io.BytesIO()
    Image.fromarray(pixels).save(png, "PNG")
    return {"role": "user", "content": [picture_part("image/png", png.getvalue()), {"type": "text", "text": text}]}


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
