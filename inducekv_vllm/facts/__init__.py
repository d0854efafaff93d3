"""Facts: stored questions with their answers, found by the text of a request.

text.py       words, numbers and symbols of a text
language.py   how questions are asked in a language; `languages/` has its words
question.py   what a question says, and what makes two wordings one question
rule.py       whether a request and a stored question are one question, or surely two, by words
index.py      of many stored questions, the one that a request asks and those that it may ask
found.py      which facts a request asks for, and which it is answered with
"""

from .found import NO_FACTS, AskedFact, AskedFacts, FactFound, FactMissed
from .index import Found, QuestionIndex
from .question import MOST_CHARACTERS, same_words
from .rule import Comparison
from .text import has_words

__all__ = [
    "MOST_CHARACTERS",
    "NO_FACTS",
    "AskedFact",
    "AskedFacts",
    "Comparison",
    "FactFound",
    "FactMissed",
    "Found",
    "QuestionIndex",
    "has_words",
    "same_words",
]
