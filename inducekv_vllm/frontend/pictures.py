"""What pictures are like, asked of the engine that serves: facts are told apart by it (`inducekv_vllm.facts.pictures`).

A request of one token brings it, like a decision about memory.
"""

from __future__ import annotations

from typing import Any

from vllm.sampling_params import SamplingParams

from ..errors import TaskDataError, UnsupportedModel
from ..protocol import PICTURE_SPEC, Decided
from .request import with_specs


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
