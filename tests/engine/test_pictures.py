"""A picture has the same pixels where it is taught and where it is served, or both refuse it in the same words."""

import io
from collections.abc import Callable
from typing import Any

import pytest
from PIL import Image, ImageOps
from vllm.multimodal.image import ALLOWED_IMAGE_FORMATS, convert_image_mode
from vllm.multimodal.media.image import ImageMediaIO

from inducekv_vllm.errors import TaskDataError
from inducekv_vllm.files.picture import FORMATS, decoded
from inducekv_vllm.frontend.pictures import read_as_task_data
from inducekv_vllm.plugin import installed_vllm
from tests.encodings import encodings

REFUSED = {"BLP", "EPS", "ICNS", "ICO", "IPTC", "PDF"}
pytestmark = pytest.mark.filterwarnings("ignore")  # Pillow's, of what is odd about a file


def outcome(decode: Callable[[bytes], Any], data: bytes) -> Any:
    """A size and pixels, or what is said."""
    try:
        found = decode(data)
    except TaskDataError as error:
        return str(error)
    found = getattr(found, "media", found)
    return found.mode, found.size, found.tobytes()


def served(data: bytes) -> Any:
    read_as_task_data()
    return ImageMediaIO().load_bytes(data)


@pytest.mark.parametrize("name", encodings())
def test_every_encoding(name: str) -> None:
    taught = outcome(decoded, encodings()[name])
    assert taught == outcome(served, encodings()[name])
    is_refused = isinstance(taught, str)
    assert is_refused == (name.partition(",")[0] in REFUSED), taught
    assert is_refused or taught[0] == "RGB"


@pytest.mark.parametrize("name", [name for name in encodings() if name.partition(",")[0] not in REFUSED])
def test_the_rule_is_that_of_vllm(name: str) -> None:
    """0.32 alone left a PNG's clear colour as it is, where it has no palette."""
    image: Any = ImageOps.exif_transpose(Image.open(io.BytesIO(encodings()[name])))
    same = convert_image_mode(image, "RGB").tobytes() == decoded(encodings()[name]).tobytes()
    assert same or (name, installed_vllm()) == ("PNG, RGB, one clear", "0.32.0")


def test_the_formats_are_those_of_vllm() -> None:
    """But for the readers that decode a file within a file."""
    assert set(ALLOWED_IMAGE_FORMATS) - set(FORMATS) == {"BLP", "ICNS", "ICO", "IPTC"}
    assert set(FORMATS) <= set(ALLOWED_IMAGE_FORMATS)
