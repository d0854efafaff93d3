"""Pixels of picture files: what is no picture, or too large a one, is refused in words before anything decodes it."""

import re
from pathlib import Path
from random import Random
from typing import Any

import pytest
from PIL import Image, ImageFile

from inducekv_vllm.errors import ConfigError, TaskDataError
from inducekv_vllm.files.picture import DEFAULT_LIMIT, LIMIT_VARIABLE, decoded
from selector.data.examples import read_task
from tests.encodings import encodings, iptc, saved, upright_if
from tests.mutations import damaged
from tests.task_data import record, write_task


def test_transparency_lies_on_white_and_turned_pictures_are_upright() -> None:
    clear = Image.new("RGBA", (2, 2), (255, 0, 0, 0))
    for mode in ("RGBA", "LA"):
        assert decoded(saved(clear.convert(mode), "PNG")).getpixel((0, 0)) == (255, 255, 255)
    for kind in ("PNG", "GIF"):
        assert decoded(saved(Image.new("P", (2, 2)), kind, transparency=0)).getpixel((0, 0)) == (255, 255, 255)
    assert decoded(saved(Image.new("L", (2, 2)), "PNG", transparency=0)).getpixel((0, 0)) == (255, 255, 255)
    turned = decoded(saved(Image.new("L", (4, 2)), "PNG", exif=upright_if(6)))
    assert (turned.size, turned.mode) == ((2, 4), "RGB")


@pytest.mark.parametrize(
    ("data", "found"),
    [
        (b"", "an empty file"),
        (b"\0\0\0\x24ftypheic\0\0\0\0mif1heic", "HEIC, as iPhones save photographs: save it as JPEG"),
        (b"<svg width=9></svg>", "bytes that begin with b'<svg width=9'"),
        (encodings()["EPS, RGB"], "bytes that begin with b'%!PS-Adobe-3'"),
        (encodings()["PDF, RGB"], "bytes that begin with b'%PDF-1.4"),
        (encodings()["ICO, RGB"], "bytes that begin with b'\\x00\\x00\\x01"),
    ],
    ids=["empty", "HEIC", "SVG", "EPS", "PDF", "ICO"],
)
def test_what_is_no_picture_is_refused_in_words(data: bytes, found: str) -> None:
    expected = f"expected a picture (JPEG, PNG, WebP, GIF, AVIF, BMP or TIFF), found {found}"
    with pytest.raises(TaskDataError, match=re.escape(expected)):
        decoded(data)


@pytest.mark.parametrize("data", [encodings()["EPS, RGB"], iptc(encodings()["EPS, RGB"])], ids=["EPS", "IPTC"])
def test_ghostscript_is_never_asked(data: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """PostScript under another name, by itself or inside of a picture."""

    def read(*_: Any) -> None:
        pytest.fail("Pillow's reader of PostScript was called")

    Image.init()
    monkeypatch.setitem(Image.OPEN, "EPS", (read, None))
    task = write_task(tmp_path, [record(0)])
    (tmp_path / "images" / "0.png").write_bytes(data)
    with pytest.raises(TaskDataError, match=r"line 1: .*0\.png: expected a picture .*, found bytes that begin with"):
        read_task(task)


def test_pictures_that_are_too_large_are_not_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pillow has a limit of its own, which is higher."""
    bombs = {side: saved(Image.new("1", (side, side)), "PNG") for side in (7072, 13_000, 14_000)}
    assert len(bombs[13_000]) < 200_000
    with monkeypatch.context() as patched:
        patched.setattr(ImageFile.ImageFile, "load", lambda _: pytest.fail("it was decoded"))
        for side, data in bombs.items():
            pixels = rf"(13000 x 13000 = )?{side * side}" if side != 7072 else "7072 x 7072 = 50013184"
            message = f"the picture has {pixels} pixels, more than {DEFAULT_LIMIT}, the limit \\({LIMIT_VARIABLE}\\)"
            with pytest.raises(TaskDataError, match=message):
                decoded(data)
    monkeypatch.setenv(LIMIT_VARIABLE, "959")
    with pytest.raises(TaskDataError, match="40 x 24 = 960 pixels, more than 959"):
        decoded(encodings()["PNG, RGB"])
    for enough in ("960", "0"):  # 0 is none, as in vLLM
        monkeypatch.setenv(LIMIT_VARIABLE, enough)
        assert decoded(encodings()["PNG, RGB"]).size == (40, 24)
    monkeypatch.setenv(LIMIT_VARIABLE, "many")
    with pytest.raises(ConfigError, match=f"{LIMIT_VARIABLE} must be a whole number of pixels, found 'many'"):
        decoded(encodings()["PNG, RGB"])


def test_messages_about_damaged_pictures_hold_no_addresses() -> None:
    rng, said = Random(0), set[str]()
    for number in range(600):
        data = damaged(rng, rng.choice(list(encodings().values())))
        try:
            assert decoded(data).mode == "RGB", number
        except TaskDataError as error:
            said.add(str(error))
    assert len(said) > 20
    assert not [each for each in said if " at 0x" in each or "\n" in each]
