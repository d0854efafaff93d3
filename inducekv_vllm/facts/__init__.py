"""Facts: stored questions with their answers, found by the words of a request, before any forward pass.

text.py       words, numbers and symbols of a text
language.py   how questions are asked in a language; `languages/` has its words
question.py   what a question says: its terms, its names, what it asks for
rule.py       whether a request asks a stored question
index.py      which of many stored questions it asks
pictures.py   which stored picture it shows
answers.py    how a stored answer enters the next token's distribution
"""

from .answers import Answers, FactsFound, mixed, next_tokens
from .index import Found, QuestionIndex
from .pictures import PictureIndex, packed, unpacked
from .question import same_words
from .rule import Comparison, Strictness

__all__ = [
    "Answers",
    "Comparison",
    "FactsFound",
    "Found",
    "PictureIndex",
    "QuestionIndex",
    "Strictness",
    "mixed",
    "next_tokens",
    "packed",
    "same_words",
    "unpacked",
]
