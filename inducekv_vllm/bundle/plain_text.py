"""What a question or an answer may not hold, in whatever way it is taught."""

from typing import Final

PICTURE_MARK: Final = "<image>"  # where a picture stands in task data, and in the prompts of many models
MARKS: Final = (PICTURE_MARK, "<video>", "<audio>")


def found_beside_text(text: str) -> str | None:
    """What is in a text that is no text, or stands for something else; None for nothing."""
    if "\0" in text:
        return "a NUL character"
    return next((f"the mark {mark}" for mark in MARKS if mark in text), None)
