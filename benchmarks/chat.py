"""Pictures and questions as the chat messages an HTTP client sends: the picture travels inside the request."""

from __future__ import annotations

import base64
import io
from typing import Any

import numpy as np
from PIL import Image

Message = dict[str, Any]


def user_turn(pixels: np.ndarray, text: str) -> Message:
    """One user message: a picture (`[height, width, 3] uint8`), then text."""
    png = io.BytesIO()
    Image.fromarray(pixels).save(png, "PNG")
    url = "data:image/png;base64," + base64.b64encode(png.getvalue()).decode()
    return {
        "role": "user",
        "content": [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": text}],
    }


def question_of(record: dict[str, Any]) -> str:
    """The text of a task record of the demo world, whose one message holds a picture and then the question."""
    return str(record["messages"][0]["content"][1]["text"])


def same_answer(given: str, expected: str) -> bool:
    """Exact match but for case, surrounding space and a closing full stop."""
    return given.strip().lower().rstrip(".") == expected.strip().lower().rstrip(".")
