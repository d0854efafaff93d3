"""Whether two questions are one, where words leave it open: a model is asked.

prompt.py     how the served model is asked
ability.py    what a model is worth as a judge
"""

from .prompt import JudgePrompt, Pair, can_be_asked, log_odds, one_line

__all__ = ["JudgePrompt", "Pair", "can_be_asked", "log_odds", "one_line"]
