"""How an artifact answers questions: plans choose model and prompt of each question, answerers ask it.

plans       for each question: the untouched model or the artifact's, exemplars before it, or the answer itself
offline     asks in this process;  http: asks servers
stored_answers    asks nothing twice
"""

from benchmarks.research.continual.answering.offline import OfflineAnswerer, OfflineModel
from benchmarks.research.continual.answering.plans import Answerer, AnsweringModel, Ask, Plan, plan

__all__ = ["Answerer", "AnsweringModel", "Ask", "OfflineAnswerer", "OfflineModel", "Plan", "plan"]
