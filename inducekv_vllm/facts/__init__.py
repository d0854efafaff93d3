"""Facts: stored questions with their answers, found by the words of a request, before any forward pass.

words.py      the words of a question
index.py      which stored questions a request asks, and how surely
threshold.py  from which score on a stored question answers a request
answers.py    how stored answers enter the next token's distribution
"""

from .answers import Answers, FactsFound, answers_of, mixed, next_tokens, weight_of
from .index import QuestionIndex, Vectors
from .threshold import fit_threshold
from .words import words_of

__all__ = [
    "Answers",
    "FactsFound",
    "QuestionIndex",
    "Vectors",
    "answers_of",
    "fit_threshold",
    "mixed",
    "next_tokens",
    "weight_of",
    "words_of",
]
