"""Pictures of a gate's questions: decoded once, and kept only while there is room for them."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image

from selector.gate import encoding
from selector.gate.fitting_set import GateQuestion
from selector.gate.variations import STYLES


@pytest.mark.parametrize(("room", "decodings"), [(10_000, 3), (100, 5), (0, 8)])
def test_pictures_are_kept_while_there_is_room(
    room: int, decodings: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three of 100 pixels, in eight questions, two of them in a style."""
    read, shown = list[bytes](), list[Image.Image]()

    def decoded(data: bytes) -> Image.Image:
        read.append(data)
        return Image.new("RGB", (10, 10), (len(data), 0, 0))

    monkeypatch.setattr(encoding, "decoded", decoded)
    monkeypatch.setattr(encoding, "PIXELS_KEPT", room)
    paths = [tmp_path / f"{number}.png" for number in range(3)]
    for number, path in enumerate(paths):
        path.write_bytes(bytes(number))
    questions = [GateQuestion([], (path,), None, "plain", "fit") for path in [*paths, *paths]]
    questions += [GateQuestion([], (paths[0],), None, "plain", "fit", style) for style in ("grey", "grey")]
    backbone: Any = SimpleNamespace(encode=lambda messages, pictures: shown.extend(pictures))
    encoding.encode_questions(backbone, questions, STYLES)
    assert len(read) == decodings
    assert [each.getpixel((0, 0))[0] for each in shown[:6]] == [0, 1, 2, 0, 1, 2]  # type: ignore[index]
