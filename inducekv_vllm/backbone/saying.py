"""How a stored answer is said: token by token, whatever the sampling.

A fact that is found is beyond doubt, so the next token is that of its answer as long as what is generated agrees with
it: kNN-LM [https://arxiv.org/abs/1911.00172] with all of the weight on what is stored. Then the model goes on alone, as
it does from a token that is ruled out.

Shapes: V vocabulary.
"""

import math
from collections.abc import Sequence

from torch import Tensor


def next_token(answer: Sequence[int], generated: Sequence[int]) -> int | None:
    """What follows in the answer; None once something else was generated, or it is complete."""
    length = len(generated)
    return answer[length] if length < len(answer) and tuple(answer[:length]) == tuple(generated) else None


def said(logits: Tensor, token: int) -> Tensor:
    """log p for one row of logits [V]: the token is certain, unless it is ruled out, with a logit of -inf."""
    if logits[token] == -math.inf:
        return logits
    certain = logits.new_full(logits.shape, -math.inf)
    certain[token] = 0.0
    return certain
