"""Task data for tests: lines of a file, and the file with its pictures."""

import json
from pathlib import Path
from typing import Any

from tests.tiny_models import picture

QUESTIONS = (
    "What colour is the circle?",
    "How many squares are there? Answer with one word.",
    "Is the red triangle left of the blue one, and does the picture show a ring? Answer in a sentence.",
)


def record(number: int, **changes: Any) -> dict[str, Any]:
    """A line of task data; its picture is `images/NUMBER.png`."""
    content = [
        {"type": "image_url", "image_url": {"url": f"images/{number}.png"}},
        {"type": "text", "text": QUESTIONS[number % len(QUESTIONS)]},
    ]
    return {
        "id": f"e{number}",
        "task": "colours",
        "messages": [{"role": "user", "content": content}],
        "answer": f"answer {number}",
    } | changes


def write_task(folder: Path, records: list[dict[str, Any]], num_pictures: int = 12) -> Path:
    (folder / "images").mkdir(parents=True, exist_ok=True)
    for number in range(num_pictures):
        # Sizes differ, so that a model with dynamic resolution gets prompts of different length.
        picture(number, width=48 + 16 * (number % 3)).save(folder / "images" / f"{number}.png")
    path = folder / "train.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in records))
    return path


def questions_about(task: str, text: str) -> list[dict[str, Any]]:
    """Twelve lines of a task's data."""
    lines = [record(number, id=f"{task}{number}", task=task) for number in range(12)]
    for line in lines:
        line["messages"][0]["content"][1]["text"] = text
    return lines
