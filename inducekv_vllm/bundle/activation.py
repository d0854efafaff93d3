"""From which position of a request its memory acts.

K and V of the positions before it are the untouched model's, so the prefix cache shares them with every other request.
"""

from collections.abc import Collection, Sequence
from typing import Literal, get_args

# Earliest first. "prompt": everything; "text": what follows the last image or other medium; "generation": the last
# prompt token, which predicts the answer's first token, and the answer.
Activation = Literal["prompt", "text", "generation"]
ACTIVATIONS: tuple[Activation, ...] = get_args(Activation)


def first_active_position(activation: Activation, token_ids: Sequence[int], placeholders: Collection[int]) -> int:
    """The first position at which memory acts on a prompt of T tokens.

    Args:
        token_ids: [T], at least one.
        placeholders: the ids of tokens that stand for media.
    """
    if activation == "prompt":
        return 0
    last = len(token_ids) - 1
    if activation == "generation":
        return last
    after_media = next((at + 1 for at in range(last, -1, -1) if token_ids[at] in placeholders), 0)
    return min(after_media, last)
