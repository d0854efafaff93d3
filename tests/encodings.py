"""One picture in every mode and format that Pillow writes: what people and programs save."""

import io
import struct
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from typing import Any, Final

from PIL import Image, ImageDraw
from PIL.Image import Image as Picture

MODES: Final = ("1", "L", "P", "RGB", "RGBA", "LA", "PA", "CMYK", "YCbCr", "HSV", "LAB", "I", "F", "I;16")
KINDS: Final = (
    *("PNG", "JPEG", "JPEG2000", "TIFF", "GIF", "WEBP", "AVIF", "BMP", "DIB", "TGA", "PPM", "PCX", "SGI", "DDS"),
    *("MSP", "XBM", "SPIDER", "QOI", "ICO", "ICNS", "BLP", "EPS", "PDF"),
)


@cache
def encodings() -> dict[str, bytes]:
    """By what it is: the bytes of a file."""
    return {**dict(_in_all_modes()), **dict(_others())}


def drawn() -> Picture:
    """In RGBA, where a part is clear and a part half so."""
    picture = Image.new("RGBA", (40, 24), (0, 0, 0, 0))
    draw = ImageDraw.Draw(picture)
    draw.rectangle((2, 2, 20, 20), fill=(200, 30, 60, 255))
    draw.ellipse((15, 5, 36, 22), fill=(20, 90, 220, 128))
    draw.line((0, 23, 39, 0), fill=(250, 240, 10, 255), width=2)
    return picture


def in_mode(mode: str) -> Picture:
    rgba = drawn()
    if mode in ("RGBA", "LA"):
        return rgba.convert(mode)
    if mode == "PA":
        return rgba.convert("RGB").quantize(16).convert("PA")
    if mode in ("I", "F"):
        return rgba.convert("L").convert(mode)
    if mode == "I;16":
        return rgba.convert("L").convert("I").point(lambda value: value * 257 + 0).convert("I;16")
    return rgba.convert("RGB").convert(mode)


def saved(picture: Picture, kind: str, **how: Any) -> bytes:
    written = io.BytesIO()
    picture.save(written, kind, **how)
    return written.getvalue()


def upright_if(orientation: int) -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif


def iptc(inside: bytes) -> bytes:
    """A picture of IPTC's format, whose reader in Pillow decodes what is inside with any other of its readers."""

    def field(record: int, tag: int, data: bytes) -> bytes:
        return struct.pack(">BBBH", 0x1C, record, tag, len(data)) + data

    size = struct.pack(">H", 8)
    head = field(3, 20, size) + field(3, 30, size) + field(3, 60, b"\1\0") + field(3, 120, b"\5")
    return head + field(8, 10, inside)


def _in_all_modes() -> Iterator[tuple[str, bytes]]:
    for kind in KINDS:
        for mode in MODES:
            with suppress(OSError, KeyError, ValueError):  # Pillow does not write it
                yield f"{kind}, {mode}", saved(in_mode(mode), kind)


def _others() -> Iterator[tuple[str, bytes]]:
    rgba, rgb, grey = drawn(), in_mode("RGB"), in_mode("L")
    palette = rgb.quantize(16)
    yield "PNG, palette, one clear", saved(palette, "PNG", transparency=0)
    yield "PNG, palette, some clear", saved(palette, "PNG", transparency=bytes([0, 90, 180] + [255] * 13))
    yield "PNG, grey, one clear", saved(grey, "PNG", transparency=grey.getpixel((5, 5)))
    yield "PNG, one bit, one clear", saved(in_mode("1"), "PNG", transparency=1)
    yield "PNG, RGB, one clear", saved(rgb, "PNG", transparency=(200, 30, 60))
    yield "GIF, one clear", saved(palette, "GIF", transparency=3)
    for kind, first in (("GIF", palette), ("PNG", rgba), ("WEBP", rgba), ("TIFF", rgb), ("MPO", rgb), ("AVIF", rgba)):
        yield f"{kind}, of several", saved(first, kind, save_all=True, append_images=[first.rotate(90)])
    for way in ("tiff_lzw", "tiff_deflate", "jpeg", "group4", "packbits"):
        yield f"TIFF, {way}", saved(in_mode("1") if way == "group4" else rgb, "TIFF", compression=way)
    yield "WEBP, lossless", saved(rgba, "WEBP", lossless=True)
    yield "JPEG, progressive", saved(rgb, "JPEG", progressive=True)
    for orientation in range(1, 9):
        yield f"JPEG, turned {orientation}", saved(rgb, "JPEG", exif=upright_if(orientation))
    for kind, picture in (("PNG", rgba), ("WEBP", rgba), ("AVIF", rgba), ("PNG", palette), ("TIFF", palette)):
        yield f"{kind}, {picture.mode}, turned", saved(picture, kind, exif=upright_if(6))
    yield "PNG, palette, one clear, turned", saved(palette, "PNG", transparency=0, exif=upright_if(6))
    yield "PNG, palette, upright", saved(palette, "PNG", exif=upright_if(1))
    yield "IPTC", iptc(saved(grey, "PPM"))
