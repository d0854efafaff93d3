"""Pictures of requests: which are refused, which pixels they have, and which of a fact's they are."""

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import cache
from typing import Any, Final, cast

from PIL import Image
from vllm.inputs import EngineInput
from vllm.multimodal.media.image import ImageMediaIO
from vllm.renderers.base import BaseRenderer

from ..backbone.fact_reader import ShownPicture
from ..bundle import PictureRecord
from ..errors import TaskDataError
from ..files.picture import converted, digest_of, in_words, opened
from ..vllm_seams.patches import patch

DIGESTS: Final = "inducekv_pictures"  # in a rendered prompt: of each picture, None if its pixels are not known
Digests = list[str | None]


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


def note_pictures(renderer: BaseRenderer) -> None:
    """Make a renderer say in its prompts which pictures they have."""

    def noting(process: Callable[..., Any]) -> Callable[..., Any]:
        def processed(prompt: Any, mm_data: Mapping[str, Any], *args: Any, **options: Any) -> Any:
            return process(prompt, mm_data, *args, **options) | {DIGESTS: _digests(mm_data)}

        return processed

    def noting_async(process: Callable[..., Coroutine[Any, Any, Any]]) -> Callable[..., Coroutine[Any, Any, Any]]:
        async def processed(prompt: Any, mm_data: Mapping[str, Any], *args: Any, **options: Any) -> Any:
            # First: once a picture is processed, vLLM sends other requests with it without its data, behind this one.
            digests = await asyncio.to_thread(_digests, mm_data)
            return await process(prompt, mm_data, *args, **options) | {DIGESTS: digests}

        return processed

    patch(renderer, "_process_multimodal", noting)
    patch(renderer, "_process_multimodal_async", noting_async)


def shown_in(prompt: EngineInput) -> list[ShownPicture]:
    """The pictures of a rendered prompt whose pixels are known."""
    rendered = cast(Mapping[str, Any], prompt)
    places = rendered.get("mm_placeholders", {}).get("image", ())
    return [
        ShownPicture(range(place.offset, place.offset + place.length), digest)
        for place, digest in zip(places, rendered.get(DIGESTS, ()), strict=False)
        if digest is not None
    ]


def record_of(prompt: Any) -> PictureRecord:
    """Of the pictures of messages that were rendered, and not processed. Raises TaskDataError: there are none."""
    pictures = [each for each in _pictures(prompt.get("multi_modal_data") or {}) if each is not None]
    if not pictures:
        raise TaskDataError("expected a picture, found none in the prompt")
    return PictureRecord.of(pictures)


def is_picture(part: dict[str, Any]) -> bool:
    return part.get("type") == "image_url"


def _digests(mm_data: Mapping[str, Any]) -> Digests:
    return [None if each is None else digest_of(each) for each in _pictures(mm_data)]


def _pictures(mm_data: Mapping[str, Any]) -> list[Image.Image | None]:
    """None for embeddings, tensors, and what the client named without sending it."""
    given = mm_data.get("image") or []
    decoded = [getattr(item, "media", item) for item in (given if isinstance(given, Sequence) else [given])]
    return [each if isinstance(each, Image.Image) else None for each in decoded]
