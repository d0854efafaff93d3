"""Pictures of requests: which are refused, and what they are like, by which facts are told apart.

What they are like (`inducekv_vllm.facts.pictures`) is asked of the engine that serves: a request of one token brings
it, like a decision about memory.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from vllm.multimodal.media.image import ImageMediaIO
from vllm.sampling_params import SamplingParams

from ..errors import TaskDataError, UnsupportedModel
from ..files.picture import converted, in_words, opened
from ..protocol import PICTURE_SPEC, Decided
from ..vllm_seams.patches import patch
from .request import with_specs


@cache  # once in a process
def read_as_task_data() -> None:
    """Make vLLM give a picture the pixels that it has in task data, and refuse what is refused there, unread."""

    def checked(load: Callable[[Any, bytes], Any]) -> Callable[[Any, bytes], Any]:
        def load_bytes(self: Any, data: bytes) -> Any:
            with in_words():
                opened(data)
                try:
                    return load(self, data)
                except ValueError as error:
                    if error.__cause__ is None:
                        raise
                    raise error.__cause__ from None  # what Pillow said

        return load_bytes

    def convert(self: Any, image: Any) -> Any:
        return converted(getattr(image, "media", image), self.image_mode, self.rgba_background_color)

    patch(ImageMediaIO, "load_bytes", checked)
    patch(ImageMediaIO, "_convert_image_mode", lambda _: convert)


def picture_params() -> SamplingParams:
    """Of the request."""
    return with_specs(SamplingParams(max_tokens=1), [PICTURE_SPEC])


def is_picture(part: dict[str, Any]) -> bool:
    """Whether a part of a chat message is a picture."""
    return part.get("type") == "image_url"


def state_in(decided: Decided | None) -> str:
    """The packed state that a request has brought.

    Raises:
        UnsupportedModel: this model does not give it.
        TaskDataError: the prompt had no picture.
    """
    if decided is not None and decided.error is not None:
        raise UnsupportedModel(decided.error)
    picture = None if decided is None else decided.each[0].picture
    if picture is None:
        raise TaskDataError("expected a picture, found none in the prompt")
    return picture
