"""From which score on a stored question answers a request.

No other wordings are needed: each stored question is asked of all the others, which do not have its answer. A request
whose fact is stored reaches 1, up to what its wording lacks; so the threshold lies halfway between 1 and what nearly
all of the others reach.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from .index import QuestionIndex

ASKED: Final = 256  # stored questions, at most
QUANTILE: Final = 0.95
FEW_FACTS: Final = 8  # fewer do not tell what names a fact from what belongs to its wording
LEAST_OF_FEW: Final = 0.97  # their questions are answered in their own wording, or nearly so
LARGEST: Final = 0.99


def fit_threshold(index: QuestionIndex) -> float:
    """The least score at which one of the index's questions answers a request, from 0.5 to `LARGEST`."""
    asked = np.unique(np.linspace(0, len(index) - 1, min(len(index), ASKED)).round().astype(int))
    others = []
    for number in asked:
        _, scores = index.search(index.questions[number], index.facts != index.facts[number])
        others.append(scores[0] if len(scores) else 0.0)
    halfway = (1 + float(np.quantile(others, QUANTILE))) / 2
    least = LEAST_OF_FEW if len(np.unique(index.facts)) < FEW_FACTS else 0.5
    return min(max(halfway, least), LARGEST)
