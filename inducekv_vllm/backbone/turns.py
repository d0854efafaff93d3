"""How a chat template marks the turns of a user, found by writing conversations with it."""

from collections.abc import Sequence
from functools import partial
from typing import Any, Final

from transformers import PreTrainedTokenizerBase

from ..errors import TaskDataError
from ..gate import TurnMarks, turn_starts
from .chat import chat_text, takes_parts

_QUESTION: Final = "zebra"  # a text that no template contains
_NO_MARKS: Final = TurnMarks((), None)


def message(role: str, text: str) -> dict[str, Any]:
    return {"role": role, "content": [{"type": "text", "text": text}]}


def answer_tokens(tokenizer: PreTrainedTokenizerBase, answer: str) -> list[int]:
    """An answer as the model must generate it: its text, then the token that ends a turn."""
    end = tokenizer.eos_token_id
    return _ids(tokenizer, answer) if end is None else [*_ids(tokenizer, answer), end]


def special_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """The tokens that are no part of a text, those of chat templates among them."""
    return frozenset(tokenizer.all_special_ids) | frozenset(tokenizer.get_added_vocab().values())


def answer_mark(processor: Any) -> tuple[int, ...]:
    """The tokens between a question and its answer; none, if the template has none.

    Args:
        processor: the model's processor, or its tokenizer.
    """
    as_parts = takes_parts(processor)
    sides = _around_question(processor, [message("user", _QUESTION)], as_parts=as_parts, generation_prompt=True)
    return () if sides is None else tuple(sides[1])


def turn_marks(processor: Any) -> TurnMarks:
    """The marks of a model's chat template; none, if it has none that tell a user's turns from the others.

    The shortest mark that begins with a special token and stands in front of the last user turn, but not behind it.

    Args:
        processor: the model's processor, or its tokenizer.
    """
    tokenizer: PreTrainedTokenizerBase = getattr(processor, "tokenizer", processor)
    question = message("user", _QUESTION)
    earlier = [message("user", "a"), message("assistant", "b")]
    around = partial(_around_question, processor, as_parts=takes_parts(processor))
    written = [
        around([question], generation_prompt=True),
        around([*earlier, question], generation_prompt=True),
        around([message("system", "c"), question], generation_prompt=True),
        around([question, message("assistant", "b")], generation_prompt=False),
    ]
    sides = [sides for sides in written if sides is not None]
    if not sides:
        return _NO_MARKS
    before, after = zip(*sides, strict=True)
    mark = _without_blank_end(tokenizer, _common([ids[::-1] for ids in before])[::-1])
    special = special_ids(tokenizer)
    starts = [at for at, token in enumerate(mark) if token in special][::-1] or ([0] if mark else [])
    # Another token than a special one could stand in a question too.
    end = next((token for token in _common(after)[:1] if token in special), None)
    for start in starts:
        marks = TurnMarks(tuple(mark[start:]), end)
        if all(turn_starts([*left, *right], marks)[-1] <= len(left) for left, right in sides):
            return marks
    return _NO_MARKS


def _around_question(
    processor: Any, messages: Sequence[dict[str, Any]], *, as_parts: bool, generation_prompt: bool
) -> tuple[list[int], list[int]] | None:
    """The token ids before and after the question; None if the template refuses the conversation."""
    try:
        text = chat_text(processor, messages, as_parts=as_parts, generation_prompt=generation_prompt)
    except TaskDataError:
        return None
    before, _, after = text.rpartition(_QUESTION)
    tokenizer = getattr(processor, "tokenizer", processor)
    return _ids(tokenizer, before), _ids(tokenizer, after)


def _ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def _common(sequences: Sequence[Sequence[int]]) -> list[int]:
    """What all sequences begin with."""
    common = []
    for tokens in zip(*sequences, strict=False):
        if len(set(tokens)) > 1:
            break
        common.append(tokens[0])
    return common


def _without_blank_end(tokenizer: PreTrainedTokenizerBase, mark: list[int]) -> list[int]:
    """Line breaks at the end of a mark can become one token with those of the question."""
    while len(mark) > 1 and not str(tokenizer.decode(mark[-1:])).strip():
        mark = mark[:-1]
    return mark
