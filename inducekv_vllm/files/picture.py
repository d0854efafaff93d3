"""The pixels of a picture's file, by one rule wherever it is read: task data, gates, facts, evaluation, a server.

It is the rule of vLLM 0.33. A server's vLLM reads files itself, behind the same checks and with the same conversion
(`inducekv_vllm.frontend.pictures`): what one side refuses, the other does, in the same words.
"""

import base64
import contextlib
import hashlib
import io
import os
import re
from collections.abc import Iterator, Sequence
from typing import Final

from PIL import Image, ImageFile, ImageOps, UnidentifiedImageError

from ..errors import ConfigError, TaskDataError

# vLLM's, without BLP, ICNS, ICO and IPTC: their readers decode a second file inside, whose size is checked by nobody
# before, or that may be of any format, and be run by Ghostscript.
FORMATS: Final = (
    *("AVIF", "BMP", "CUR", "DCX", "DDS", "DIB", "FITS", "FLI", "FTEX", "GBR", "GIF", "IM", "IMT", "JPEG", "JPEG2000"),
    *("MCIDAS", "MSP", "PCD", "PCX", "PIXAR", "PNG", "PPM", "PSD", "QOI", "SGI", "SPIDER", "SUN", "TGA", "TIFF"),
    *("WEBP", "XBM", "XPM", "XVTHUMB"),
)
USUAL: Final = "JPEG, PNG, WebP, GIF, AVIF, BMP or TIFF"
LIMIT_VARIABLE: Final = "VLLM_MAX_IMAGE_PIXELS"
DEFAULT_LIMIT: Final = 50_000_000  # pixels; decoding takes 9 bytes for each, and one more
WHITE: Final = (255, 255, 255)
THUMBNAIL: Final = (96, 96)  # pixels a side, at most
THUMBNAILS: Final = 4
MAX_THUMBNAIL: Final = 2**16  # bytes of base64, more than any of these pixels take
_HEIC: Final = re.compile(rb".{4}ftyp(hei[cxms]|hev[cxms]|mif1|msf1)", re.DOTALL)
_ADDRESS: Final = re.compile(r" at 0x[0-9a-f]+")


def decoded(data: bytes) -> Image.Image:
    """The picture in RGB: upright by its EXIF, transparency on white. Raises TaskDataError: it cannot be used."""
    with in_words():
        image: Image.Image = opened(data)
        with contextlib.suppress(Exception):  # as vLLM does
            image = ImageOps.exif_transpose(image)
        image.load()
        return converted(image, "RGB", WHITE)


def digest_of(picture: Image.Image) -> str:
    """SHA-256 of its size and pixels in RGB: another pixel is another digest."""
    rgb = converted(picture, "RGB", WHITE)
    return hashlib.sha256(b"%d x %d:" % rgb.size + rgb.tobytes()).hexdigest()


def joined(digests: Sequence[str]) -> str:
    """The digest of several pictures, in their order; of one, its own."""
    return digests[0] if len(digests) == 1 else hashlib.sha256(" ".join(digests).encode()).hexdigest()


def thumbnail_of(pictures: Sequence[Image.Image]) -> str:
    """The first few side by side, for people, in base64 of JPEG: some 3 KB."""
    small = [ImageOps.contain(converted(each, "RGB", WHITE), THUMBNAIL) for each in pictures[:THUMBNAILS]]
    sheet = Image.new("RGB", (sum(each.width for each in small), max(each.height for each in small)), WHITE)
    for number, each in enumerate(small):
        sheet.paste(each, (sum(before.width for before in small[:number]), 0))
    sheet.save(written := io.BytesIO(), "JPEG", quality=70)
    return base64.b64encode(written.getvalue()).decode()


def opened(data: bytes) -> ImageFile.ImageFile:
    """The picture, of which only the header was read.

    Raises:
        TaskDataError: it has no format that is read, or more pixels than may be decoded.
        ConfigError: the variable for the limit is no number.
    """
    most = most_pixels()
    Image.init()  # all of Pillow's readers; versions differ in which there are
    try:
        image = Image.open(io.BytesIO(data), formats=[each for each in FORMATS if each in Image.OPEN])
        found = f"{image.width} x {image.height} = {image.width * image.height}"
        is_too_large = image.width * image.height > most
    except UnidentifiedImageError:
        raise TaskDataError(f"expected a picture ({USUAL}), found {_kind(data)}") from None
    except Image.DecompressionBombError as error:  # its message has the number, and a limit above ours
        found, is_too_large = "".join(re.findall(r"\((\d+) pixels\)", str(error))), True
    if is_too_large:
        raise TaskDataError(f"the picture has {found} pixels, more than {most}, the limit ({LIMIT_VARIABLE})")
    return image


def most_pixels() -> int:
    """Of a picture, from vLLM's own variable, which has another default there. Raises ConfigError: it is no number."""
    given = os.environ.get(LIMIT_VARIABLE, str(DEFAULT_LIMIT))
    if not re.fullmatch(r"-?\d+", given):
        raise ConfigError(f"{LIMIT_VARIABLE} must be a whole number of pixels, found {given!r:.80}")
    pillows = 2 * (Image.MAX_IMAGE_PIXELS or 2**40)
    return min(int(given), pillows) if int(given) > 0 else pillows  # 0 is none of vLLM's


@contextlib.contextmanager
def in_words() -> Iterator[None]:
    """Whatever a decoder raises is a TaskDataError: Pillow's raise anything that a damaged file leads them to."""
    try:
        yield
    except (TaskDataError, ConfigError):
        raise
    except Exception as error:
        said = _ADDRESS.sub("", f"{error}") or type(error).__name__
        raise TaskDataError(f"the picture cannot be decoded: {said:.200}") from error


def converted(image: Image.Image, mode: str | None, background: tuple[int, ...]) -> Image.Image:
    """The picture in this mode (None: in its own); in RGB, what is transparent lies on the background."""
    if mode is None:
        return image
    if mode == "RGB" and (image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info):
        with_alpha = image if image.mode == "RGBA" else image.convert("RGBA")
        opaque = Image.new("RGB", image.size, background)
        opaque.paste(with_alpha, mask=with_alpha.getchannel("A"))
        return opaque
    return image if image.mode == mode else image.convert(mode)


def _kind(data: bytes) -> str:
    if not data:
        return "an empty file"
    if _HEIC.match(data):
        return "HEIC, as iPhones save photographs: save it as JPEG"
    return f"bytes that begin with {data[:12]!r}"
