"""Facts: stored questions with their answers, found by the words of a request, before any forward pass.

text.py       words, numbers and symbols of a text
language.py   how questions are asked in a language; `languages/` has its words
question.py   what a question says: its terms, its names, what it asks for
rule.py       whether a request asks a stored question
index.py      which of many stored questions it asks
pictures.py   which stored picture it shows
answer.py     how a stored answer is said
"""

from .answer import FactFound, FactMissed, next_token, said
from .index import CACHED_QUESTIONS, Found, QuestionIndex
from .pictures import PictureIndex, packed, unpacked
from .question import MOST_CHARACTERS, same_words
from .rule import SAME, Comparison
from .text import has_words

__all__ = [
    "CACHED_QUESTIONS",
    "MOST_CHARACTERS",
    "SAME",
    "Comparison",
    "FactFound",
    "FactMissed",
    "Found",
    "PictureIndex",
    "QuestionIndex",
    "has_words",
    "next_token",
    "packed",
    "said",
    "same_words",
    "unpacked",
]
