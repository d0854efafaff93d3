"""A question as people ask it: wrapped in phrases, in a conversation, between other sentences, in capitals, mistyped.

Phrases are given, so that those of a fit and those of a measurement can differ.
"""

from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Any, Final

from PIL import Image, ImageFilter, ImageOps

from inducekv_vllm.backbone.turns import message

from .background import Phrases

Messages = Sequence[Mapping[str, Any]]
Vary = Callable[[Messages, Phrases, Random], list[dict[str, Any]]]


def text_of(messages: Messages) -> str:
    """The text of the last turn."""
    return " ".join(part["text"] for part in messages[-1]["content"] if part["type"] == "text")


def with_text(messages: Messages, text: str) -> list[dict[str, Any]]:
    """The messages with another text in the last turn, in the place of its last text part or at its end; media stay."""
    parts = messages[-1]["content"]
    if all(part["type"] != "text" for part in parts):
        parts = [*parts, {"type": "text", "text": ""}]
    texts = [at for at, part in enumerate(parts) if part["type"] == "text"]
    new = [
        {"type": "text", "text": text} if at == texts[-1] else part
        for at, part in enumerate(parts)
        if part["type"] != "text" or at == texts[-1]
    ]
    return [*map(dict, messages[:-1]), {**messages[-1], "content": new}]


def plain(messages: Messages, phrases: Phrases, rng: Random) -> list[dict[str, Any]]:
    return [dict(turn) for turn in messages]


def wrapped(messages: Messages, phrases: Phrases, rng: Random) -> list[dict[str, Any]]:
    return with_text(messages, rng.choice(phrases.wrappers).replace("{question}", text_of(messages)))


def system(messages: Messages, phrases: Phrases, rng: Random) -> list[dict[str, Any]]:
    """After a system prompt; the example's own stays if it has one."""
    first = [] if messages[0]["role"] == "system" else [message("system", rng.choice(phrases.systems))]
    return [*first, *map(dict, messages)]


def second_turn(messages: Messages, phrases: Phrases, rng: Random) -> list[dict[str, Any]]:
    return _after_turns(messages, [rng.choice(phrases.turns)])


def later_turn(messages: Messages, phrases: Phrases, rng: Random) -> list[dict[str, Any]]:
    return _after_turns(messages, rng.sample(phrases.turns, 3))


def capitals(messages: Messages, phrases: Phrases, rng: Random) -> list[dict[str, Any]]:
    return with_text(messages, text_of(messages).upper())


def lower_case(messages: Messages, phrases: Phrases, rng: Random) -> list[dict[str, Any]]:
    return with_text(messages, text_of(messages).lower().rstrip("?.!"))


def mistyped(messages: Messages, phrases: Phrases, rng: Random) -> list[dict[str, Any]]:
    return with_text(messages, typing_errors(text_of(messages), rng))


def before(words: int) -> Vary:
    """With that many words of prose in front of it."""
    return lambda messages, phrases, rng: with_text(messages, f"{prose(phrases, words, rng)} {text_of(messages)}")


def after(words: int) -> Vary:
    return lambda messages, phrases, rng: with_text(messages, f"{text_of(messages)} {prose(phrases, words, rng)}")


def prose(phrases: Phrases, words: int, rng: Random) -> str:
    """So many words of whole sentences, the last one cut."""
    found: list[str] = []
    while len(found) < words:
        found += rng.choice(phrases.sentences).split()
    return " ".join(found[:words]).rstrip(".,") + "."


def typing_errors(text: str, rng: Random) -> str:
    """One error in about 25 letters: two letters exchanged, one left out or one doubled."""
    letters = list(text)
    places = [at for at in range(len(text) - 1) if text[at].isalpha() and text[at + 1].isalpha()]
    for at in rng.sample(places, min(len(places), max(1, len(text) // 25))):
        match rng.randrange(3):
            case 0:
                letters[at], letters[at + 1] = letters[at + 1], letters[at]
            case 1:
                letters[at] = ""
            case _:
                letters[at] *= 2
    return "".join(letters)


def _after_turns(messages: Messages, turns: Sequence[tuple[str, str]]) -> list[dict[str, Any]]:
    """The conversation after earlier turns of (user, assistant); a system prompt stays in front."""
    head = 1 if messages[0]["role"] == "system" else 0
    earlier = [message(role, text) for turn in turns for role, text in zip(("user", "assistant"), turn, strict=True)]
    return [*map(dict, messages[:head]), *earlier, *map(dict, messages[head:])]


# What a fit draws from, besides the question as it stands and wrapped.
OTHERS: Final[tuple[Vary, ...]] = (
    system,
    second_turn,
    later_turn,
    capitals,
    lower_case,
    mistyped,
    before(12),
    after(12),
    before(40),
    after(40),
)
LONG: Final[tuple[Vary, ...]] = (before(300), after(300))  # rarely, for their length
# What a fit shows pictures in, besides as they are.
STYLES: Final[Mapping[str, Callable[[Image.Image], Image.Image]]] = {
    "inverted": ImageOps.invert,
    "grey": lambda picture: ImageOps.grayscale(picture).convert("RGB"),
    "mirrored": ImageOps.mirror,
    "blurred": lambda picture: picture.filter(ImageFilter.GaussianBlur(max(picture.size) / 40)),
    "tinted": lambda picture: Image.blend(picture, Image.new("RGB", picture.size, (250, 190, 80)), 0.4),
}
