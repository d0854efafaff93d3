"""Files of pictures as people have them, drawn from seeds: photographs, screenshots, scanned forms, logos, charts.

    python -m benchmarks.pictures.files --out DIR

Those of one kind have one layout: two forms or two screenshots differ in what is written in them. Tables name them.
"""

from __future__ import annotations

import base64
import csv
import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any, Final

import numpy as np
from PIL import Image, ImageDraw, ImageFont, ImageOps
from PIL.Image import Image as Picture

from benchmarks.record import parser_of

Draw = ImageDraw.ImageDraw
PHOTOGRAPH: Final = (4032, 3024)  # 12 megapixels
TURNED: Final = 6  # the EXIF orientation of a phone that was held upright
NAMES: Final = ("Alvarez", "Baker", "Chen", "Dubois", "Eriksen", "Fischer", "Garcia", "Haddad", "Ivanov", "Jansen")
ITEMS: Final = ("Paper, A4", "Toner", "Desk lamp", "Cable, 2 m", "Chair", "Keyboard", "Stapler", "Monitor arm")
WORDS: Final = (
    *(
        "meeting",
        "moved",
        "room",
        "review",
        "draft",
        "invoice",
        "paid",
        "signed",
        "copy",
        "customer",
        "asked",
        "refund",
    ),
    *("order", "arrived", "broken", "release", "ready", "tests", "green", "build", "failed", "again", "noon", "please"),
)


def photograph(seed: int) -> bytes:
    """JPEG of 12 megapixels, turned by its EXIF: soft light, some things, noise of a sensor."""
    rng, width, height = np.random.default_rng(seed), *PHOTOGRAPH
    light = np.zeros((height // 8, width // 8, 3), np.float32)
    for cells, strength in ((3, 90), (9, 40), (27, 15)):
        coarse = rng.uniform(0, 255, (cells, cells, 3)).astype(np.uint8)
        smooth = Image.fromarray(coarse).resize((width // 8, height // 8), Image.Resampling.BICUBIC)
        light += (np.asarray(smooth, np.float32) - 127) / 127 * strength
    scene = Image.fromarray((light + 127).clip(0, 255).astype(np.uint8))
    draw = ImageDraw.Draw(scene)
    for _ in range(5):
        x, y, size = rng.integers(0, width // 8), rng.integers(0, height // 8), rng.integers(20, 120)
        draw.ellipse((x, y, x + size, y + size), fill=tuple(map(int, rng.integers(0, 255, 3))))
    return _taken(scene, rng)


def photographed(scene: Picture, seed: int) -> bytes:
    """A square picture as a phone takes it."""
    width, height = PHOTOGRAPH
    around = Image.new("RGB", (width // 8, height // 8), (120, 116, 110))
    square = scene.resize((height // 8, height // 8), Image.Resampling.NEAREST)
    around.paste(square.transpose(Image.Transpose.ROTATE_90), ((width - height) // 16, 0))
    return _taken(around, np.random.default_rng(seed))


def _taken(scene: Picture, rng: np.random.Generator) -> bytes:
    """With the noise of a sensor, and the EXIF of a phone."""
    width, height = PHOTOGRAPH
    noise = rng.normal(0, 6, (height // 4, width // 4, 1)).astype(np.float32)
    fine = np.asarray(scene.resize((width // 4, height // 4), Image.Resampling.BICUBIC), np.float32) + noise
    sharp = Image.fromarray(fine.clip(0, 255).astype(np.uint8)).resize(PHOTOGRAPH, Image.Resampling.BICUBIC)
    exif = Image.Exif()
    exif[0x010F], exif[0x0110], exif[0x0112] = "Phone", "12 MP", TURNED
    return _saved(sharp, "JPEG", quality=92, exif=exif)


def screenshot(seed: int, *, twin: bool = False) -> bytes:
    """PNG: a window of messages, which alone differ. A twin has one other word."""
    rng, picture = Random(seed), Image.new("RGB", (1920, 1080), (245, 246, 248))
    draw = ImageDraw.Draw(picture)
    draw.rectangle((0, 0, 1920, 60), fill=(40, 60, 110))
    draw.text((24, 14), "Inbox - Mail", fill="white", font=_font(28))
    draw.rectangle((0, 60, 280, 1080), fill=(228, 231, 238))
    for number, folder in enumerate(("Inbox", "Sent", "Drafts", "Archive", "Trash")):
        draw.text((32, 100 + 56 * number), folder, fill=(60, 60, 70), font=_font(24))
    for number in range(14):
        y = 80 + 70 * number
        draw.line((300, y + 60, 1900, y + 60), fill=(210, 212, 218))
        draw.text((320, y), rng.choice(NAMES), fill=(20, 20, 30), font=_font(24))
        words = rng.choices(WORDS, k=12)
        if twin and number == 9:
            words[5] = WORDS[WORDS.index(words[5]) - 1]
        draw.text((320, y + 30), " ".join(words), fill=(110, 110, 120), font=_font(20))
    return _saved(picture, "PNG")


def form(seed: int, *, twin: bool = False) -> bytes:
    """Grey PNG: a scanned form with a table, whose entries alone differ. A twin has one other digit."""
    rng, picture = Random(seed), Image.new("L", (1240, 1754), 250)
    draw = ImageDraw.Draw(picture)
    draw.text((90, 80), "PURCHASE ORDER", fill=20, font=_font(52))
    for number, (label, value) in enumerate(
        (("Name", rng.choice(NAMES)), ("Date", f"{rng.randint(1, 28):02}.{rng.randint(1, 12):02}.2026"))
    ):
        draw.text((90, 200 + 60 * number), f"{label}:", fill=60, font=_font(30))
        draw.text((300, 200 + 60 * number), value, fill=10, font=_font(30))
    total = 0
    for row in range(16):
        y = 380 + 70 * row
        draw.line((90, y, 1150, y), fill=120, width=2)
        if row < 15:
            amount = rng.randint(1, 99)
            price = rng.randint(100, 99_999)
            total += amount * price
            shown = price ^ (twin and row == 7)  # 0 and 1, 2 and 3, ...
            cells = (rng.choice(ITEMS), str(amount), f"{shown / 100:.2f}", f"{amount * price / 100:.2f}")
            for x, cell in zip((110, 600, 760, 960), cells, strict=True):
                draw.text((x, y + 16), cell, fill=30, font=_font(28))
    for x in (90, 580, 740, 940, 1150):
        draw.line((x, 380, x, 380 + 70 * 15), fill=120, width=2)
    draw.text((760, 1480), f"Total  {total / 100:.2f}", fill=10, font=_font(40))
    return _saved(picture, "PNG")


def logo(seed: int) -> bytes:
    """PNG with transparency: two letters on a shape."""
    rng, picture = Random(seed), Image.new("RGBA", (512, 512), (0, 0, 0, 0))
    draw = ImageDraw.Draw(picture)
    colour = tuple(rng.randint(0, 200) for _ in range(3))
    shape: Callable[..., None] = rng.choice((draw.ellipse, draw.rectangle, draw.rounded_rectangle))
    shape((40, 40, 472, 472), *((90,) if shape == draw.rounded_rectangle else ()), fill=(*colour, 255))
    letters = "".join(rng.choices("ABCDEFGHKLMNPRSTUVWXYZ", k=2))
    draw.text((256, 256), letters, fill=(255, 255, 255, 230), font=_font(220), anchor="mm")
    return _saved(picture, "PNG")


def chart(seed: int, *, twin: bool = False) -> bytes:
    """PNG with a palette: bars, whose heights alone differ. Of a twin, one is higher by one."""
    rng, picture = Random(seed), Image.new("RGB", (1200, 800), "white")
    draw = ImageDraw.Draw(picture)
    draw.text((600, 40), "Sales by month", fill="black", font=_font(36), anchor="mm")
    draw.line((100, 100, 100, 700, 1150, 700), fill="black", width=3)
    for month, name in enumerate("JFMAMJJASOND"):
        x, value = 120 + 85 * month, rng.randint(5, 98) + (twin and month == 4)
        draw.rectangle((x, 700 - 6 * value, x + 60, 698), fill=(70, 120, 180))
        draw.text((x + 30, 685 - 6 * value), str(value), fill="black", font=_font(22), anchor="mm")
        draw.text((x + 30, 730), name, fill="black", font=_font(26), anchor="mm")
    return _saved(picture.quantize(64), "PNG")


KINDS: Final[Mapping[str, Callable[[int], bytes]]] = {
    "photographs": photograph,
    "screenshots": screenshot,
    "forms": form,
    "logos": logo,
    "charts": chart,
}


def scaled(data: bytes, longest: int | None, quality: int | None) -> bytes:
    """What a chat client makes of a file before it sends it: at most so many pixels a side, JPEG or else PNG."""
    picture: Picture = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    if picture.mode == "P":
        picture = picture.convert("RGB")
    if longest is not None:
        picture.thumbnail((longest, longest), Image.Resampling.LANCZOS)
    if quality is None:
        return _saved(picture, "PNG")
    if picture.mode == "RGBA":
        picture = Image.alpha_composite(Image.new("RGBA", picture.size, "white"), picture).convert("RGB")
    return _saved(picture, "JPEG", quality=quality)


SENT: Final[Mapping[str, Callable[[bytes], bytes]]] = {
    "the same bytes": lambda data: data,
    "PNG": lambda data: scaled(data, None, None),
    "JPEG 85": lambda data: scaled(data, None, 85),
    "1024 a side": lambda data: scaled(data, 1024, None),
    "1024 a side, JPEG 85": lambda data: scaled(data, 1024, 85),
    "512 a side": lambda data: scaled(data, 512, None),
    "512 a side, JPEG 85": lambda data: scaled(data, 512, 85),
}


def _saved(picture: Picture, kind: str, **how: Any) -> bytes:
    written = io.BytesIO()
    picture.save(written, kind, **how)
    return written.getvalue()


def _font(size: int) -> Any:
    return ImageFont.load_default(size)


def write(folder: Path, count: int) -> None:
    """A folder as strangers have it: some files of each kind, one in HEIC, and tables that name them in three ways."""
    rows = []
    for kind, drawn in KINDS.items():
        (folder / kind).mkdir(parents=True, exist_ok=True)
        for seed in range(count):
            name = f"{kind}/{seed}.{'jpg' if kind == 'photographs' else 'png'}"
            (folder / name).write_bytes(drawn(seed))
            rows.append((name, "What is this called?", f"{kind[:-1]} {seed}"))
    (folder / "photographs" / "IMG_0001.HEIC").write_bytes(b"\0\0\0\x24ftypheic\0\0\0\0mif1heic" + bytes(2000))
    _write_table(folder / "pictures.csv", rows)
    _write_table(folder / "heic.csv", [("photographs/IMG_0001.HEIC", *rows[0][1:])])
    _write_table(folder / "urls.csv", [(f"https://example.org/{name}", *others) for name, *others in rows[:1]])
    logos = [row for row in rows if row[0].startswith("logos")]
    as_data = [base64.b64encode((folder / name).read_bytes()).decode() for name, *_ in logos]
    named = zip(as_data, logos, strict=True)
    _write_table(folder / "data.csv", [(f"data:image/png;base64,{data}", *row[1:]) for data, row in named])


def _write_table(path: Path, rows: Sequence[tuple[str, ...]]) -> None:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([("image", "question", "answer"), *rows])


def main() -> None:
    parser = parser_of(__doc__, has_result=False)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--count", type=int, default=4, help="files of a kind (default: 4)")
    options = parser.parse_args()
    write(options.out, options.count)


if __name__ == "__main__":
    main()
