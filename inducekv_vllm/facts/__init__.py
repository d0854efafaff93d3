"""Facts: stored questions with their answers, found by the words of a request, before any forward pass.

words.py      the words of a question
pictures.py   its picture, as one more word
index.py      which stored questions a request asks, and how surely
threshold.py  from which score on a stored question answers a request
answers.py    how stored answers enter the next token's distribution
"""

from .answers import Answers, FactsFound, answers_of, mixed, next_tokens, weight_of
from .index import QuestionIndex, Vectors
from .pictures import PictureVectors, asked_words, packed, unpacked
from .threshold import fit_threshold
from .words import own_direction, words_of

__all__ = [
    "Answers",
    "FactsFound",
    "PictureVectors",
    "QuestionIndex",
    "Vectors",
    "answers_of",
    "asked_words",
    "fit_threshold",
    "mixed",
    "next_tokens",
    "own_direction",
    "packed",
    "unpacked",
    "weight_of",
    "words_of",
]
