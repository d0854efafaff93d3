"""How what a method has made answers questions: plans say what to ask of which model, answerers ask it.

plans       for each question: the untouched model or the artifact's, what stands before it, or the answer itself
offline     carries plans out in this process
answerer    what every answerer is, and when an answer is right
"""

from benchmarks.continual.answering.answerer import MAX_NEW_TOKENS, Answerer, Asked, is_right
from benchmarks.continual.answering.offline import OfflineAnswerer, OfflineModel
from benchmarks.continual.answering.plans import Ask, Plan, plan

__all__ = [
    "MAX_NEW_TOKENS",
    "Answerer",
    "Ask",
    "Asked",
    "OfflineAnswerer",
    "OfflineModel",
    "Plan",
    "is_right",
    "plan",
]
