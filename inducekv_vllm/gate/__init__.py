"""The relevance gate: which task's memory a request uses, if any.

It looks at some layers' attention values, in the tokens that decide. Each of its prototypes says how close the closest
of these tokens, or of their means, comes to it (`evidence`). A gate for text has two classifiers in their place: one
of means of the question's tokens (`odds`), one of its words (`words`); both see runs of its clauses (`clauses`). A rule
weighs the evidence for each task (`rule`). The selector fits all of it, and the server applies it with the same
functions.
"""

from .clauses import ends_clause, runs_of_tokens
from .evidence import (
    PIECE,
    WINDOW,
    QuestionTokens,
    TokenScores,
    TurnMarks,
    above_floors,
    deciding_tokens,
    evidence_of_texts,
    in_pieces,
    last_averaged,
    prompt_evidence,
    turn_starts,
)
from .odds import RANGE, MeanScores, as_evidence
from .rule import Closed, GateDecision, RelevanceGate
from .words import BUCKETS, WordScores

__all__ = [
    "BUCKETS",
    "PIECE",
    "RANGE",
    "WINDOW",
    "Closed",
    "GateDecision",
    "MeanScores",
    "QuestionTokens",
    "RelevanceGate",
    "TokenScores",
    "TurnMarks",
    "WordScores",
    "above_floors",
    "as_evidence",
    "deciding_tokens",
    "ends_clause",
    "evidence_of_texts",
    "in_pieces",
    "last_averaged",
    "prompt_evidence",
    "runs_of_tokens",
    "turn_starts",
]
