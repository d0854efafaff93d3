"""The relevance gate: which task's memory a request uses, if any.

It looks at some layers' attention values, in the tokens that decide. Each of its prototypes says how close the closest
of these tokens, or of their means, comes to it (`evidence`); a rule weighs the evidence for each task (`rule`). The
selector fits all of it, and the server applies it with the same functions.
"""

from .digest import token_digest
from .evidence import (
    PIECE,
    Deciding,
    TokenScores,
    TurnMarks,
    above_floors,
    deciding_tokens,
    in_pieces,
    last_averaged,
    prompt_evidence,
    turn_starts,
)
from .rule import Closed, GateDecision, RelevanceGate

__all__ = [
    "PIECE",
    "Closed",
    "Deciding",
    "GateDecision",
    "RelevanceGate",
    "TokenScores",
    "TurnMarks",
    "above_floors",
    "deciding_tokens",
    "in_pieces",
    "last_averaged",
    "prompt_evidence",
    "token_digest",
    "turn_starts",
]
