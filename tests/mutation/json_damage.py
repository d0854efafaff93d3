"""Changes of JSON that keep its structure: one value, key or list at a time becomes something else."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from hypothesis import strategies as st

Path = tuple[str | int, ...]

LONE_SURROGATES = ("\ud800", "a\udfffb")
STRINGS = ("", " ", "\0", "a\0b", "\ufeff", "\n", "\x1b[2J", "\u202e", "\u2028", "é", "🙂", "NaN", "../x", "x" * 70_000)
NUMBERS = (0, -1, 1, 2, 3, 5, 2**31 - 1, 2**31, 2**32, 2**53 + 1, 2**63 - 1, 2**63, 2**64, 10**18, 10**40)
# Much for the parser from few bytes.
BOMB_PIECES = (
    "[]",
    "{}",
    '{"":0}',
    '{"":[]}',
    "[[]]",
    "0",
    '""',
    '"🙂"',
    '{"a":{"b":0}}',
    "1e-9",
    '{"role":"user","content":""}',
)


class Raw(str):
    """JSON text, valid or not, that is written as it is."""


class Pairs(list[tuple[str, Any]]):
    """An object that may have a key twice."""


def text_of(value: Any) -> str:
    """JSON text in ASCII."""
    if isinstance(value, Raw):
        return str(value)
    if isinstance(value, dict):
        value = Pairs(value.items())
    if isinstance(value, Pairs):
        return "{" + ",".join(f"{json.dumps(key)}:{text_of(member)}" for key, member in value) + "}"
    if isinstance(value, list):
        return "[" + ",".join(text_of(member) for member in value) + "]"
    return json.dumps(value)


def paths(value: Any, at: Path = ()) -> Iterator[Path]:
    """The places of all values, the whole included."""
    yield at
    members = value.items() if isinstance(value, dict) else enumerate(value) if type(value) is list else ()
    for key, member in members:
        yield from paths(member, (*at, key))


def value_at(tree: Any, path: Path) -> Any:
    for key in path:
        tree = tree[key]
    return tree


def replaced(tree: Any, path: Path, value: Any) -> Any:
    """A copy with another value at a place."""
    if not path:
        return value
    copy = dict(tree) if isinstance(tree, dict) else list(tree)
    copy[path[0]] = replaced(tree[path[0]], path[1:], value)
    return copy


def digits(count: int) -> Raw:
    return Raw("9" * count)


def nested(opening: str, depth: int) -> Raw:
    closing = {"[": "]", '{"a":': "}"}[opening]
    return Raw(opening * depth + "0" + closing * depth)


def bombs(most_bytes: int) -> st.SearchStrategy[Raw]:
    """Lists of as many small values as fit."""

    def bomb(piece: str, share: float) -> Raw:
        return Raw("[" + ",".join([piece] * int(share * most_bytes / (len(piece.encode()) + 1))) + "]")

    return st.builds(bomb, st.sampled_from(BOMB_PIECES), st.sampled_from((0.001, 0.03, 0.25, 0.999)))


SCALARS = (
    st.none()
    | st.booleans()
    | st.sampled_from(NUMBERS)
    | st.integers()
    | st.floats()
    | st.sampled_from((*STRINGS, *LONE_SURROGATES))
    | st.text(max_size=20)
    | st.sampled_from((Raw("1e999"), Raw("-0"), Raw("1E400"), Raw("01"), Raw("Infinity"), Raw("'a'"), Raw("")))
    | st.integers(1, 9000).map(digits)
)
ABSURD = (
    SCALARS
    | st.builds(nested, st.sampled_from(("[", '{"a":')), st.integers(1, 3000))
    | st.lists(SCALARS, max_size=4)
    | st.dictionaries(st.text(max_size=8) | st.sampled_from(LONE_SURROGATES), SCALARS, max_size=3)
)


def edit(draw: st.DrawFn, tree: Any) -> Any:
    """A tree of JSON values with one change."""
    places = list(paths(tree))
    path = places[draw(st.integers(0, len(places) - 1))]
    return replaced(tree, path, _changed(draw, tree, value_at(tree, path)))


def _changed(draw: st.DrawFn, tree: Any, value: Any) -> Any:
    kinds = ["absurd", "absurd", "wrap", "elsewhere"]
    if isinstance(value, dict):
        kinds += ["delete", "rename", "insert", "twice"]
    elif isinstance(value, list):
        kinds += ["delete", "repeat", "reverse", "append"]
    elif isinstance(value, str):
        kinds += ["text", "text"]
    elif isinstance(value, int | float):
        kinds += ["number", "number"]
    match draw(st.sampled_from(kinds)):
        case "absurd":
            return draw(ABSURD)
        case "wrap":
            return draw(st.sampled_from(([value], {"a": value}, text_of(value))))
        case "elsewhere":
            places = list(paths(tree))
            return value_at(tree, places[draw(st.integers(0, len(places) - 1))])
        case "delete" if value:
            without = draw(st.sampled_from(sorted(value) if isinstance(value, dict) else range(len(value))))
            if isinstance(value, dict):
                return {key: member for key, member in value.items() if key != without}
            return [*value[:without], *value[without + 1 :]]
        case "rename" if value:
            old, new = draw(st.sampled_from(sorted(value))), draw(_keys())
            return {new if key == old else key: member for key, member in value.items()}
        case "insert":
            return {**value, draw(_keys()): draw(ABSURD)}
        case "twice" if value:
            key = draw(st.sampled_from(sorted(value)))
            other = (key, draw(ABSURD | st.just(value[key])))
            return draw(st.sampled_from((Pairs([*value.items(), other]), Pairs([other, *value.items()]))))
        case "repeat":
            return value * draw(st.sampled_from((2, 3, 1000)))
        case "reverse":
            return value[::-1]
        case "append":
            return [*value, draw(ABSURD)]
        case "text":
            place = draw(st.integers(0, len(value)))
            return value[:place] + draw(st.sampled_from((*STRINGS, *LONE_SURROGATES))) + value[place:]
        case "number":
            changes = (value + 1, value - 1, -value, float(value), value * 2**31, str(value), value + 0.5, bool(value))
            return draw(st.sampled_from(changes))
    return value


def _keys() -> st.SearchStrategy[str]:
    return st.sampled_from((*STRINGS, *LONE_SURROGATES, "__metadata__", "id", "format_version", "shape")) | st.text(
        max_size=8
    )
