"""The facts' benchmarks: the shares of pictures are those of what was found."""

from __future__ import annotations

from random import Random
from types import SimpleNamespace
from typing import Any

from PIL import Image

from benchmarks.research.facts import pictures


class Shown:
    """Things of one colour each."""

    def kinds(self, concept: Any) -> dict[str, pictures.Picture]:
        shown = Image.new("RGB", (48, 48), concept.colour)
        return {kind: changed(shown) for kind, changed in pictures.KINDS.items()}

    def of(self, concept: Any) -> pictures.Picture:
        return self.kinds(concept)["the same picture"]


class ByColour:
    """Finds what has exactly the stored colour."""

    offline = SimpleNamespace(unload_bundle=lambda memory: None)

    def teach(self, shown: Any) -> Any:
        return {each.getpixel((24, 24)): name for name, each in shown.items()}

    def found(self, memory: Any, shown: Any) -> list[str | None]:
        return [memory.get(each.getpixel((24, 24))) for each in shown]


def test_shares_of_pictures() -> None:
    """A brighter picture of one thing is the other's colour; half of the unknown ones look like a known one."""
    colours = {"a": (100, 0, 0), "b": (110, 0, 0), "c": (0, 100, 0), "d": (100, 0, 0)}
    things: Any = [SimpleNamespace(name=name, colour=colour) for name, colour in colours.items()]
    for seed in range(100):
        if [each.name for each in Random(seed).sample(things, 4)] == ["a", "b", "c", "d"]:
            break
    asked: Any = ByColour()
    drawn: Any = Shown()
    rows = {row["picture"]: row for row in pictures.measure(asked, drawn, things, 2, seed)}
    assert [rows["the same picture"][name] for name in ("right", "wrong", "unknown")] == [1.0, 0.0, 0.5]
    assert [rows["10% brighter"][name] for name in ("right", "wrong", "unknown")] == [0.0, 0.5, 0.5]
    assert rows["cropped by 4%"]["right"] == 1.0
