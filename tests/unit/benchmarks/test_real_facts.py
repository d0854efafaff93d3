"""`benchmarks.real.facts`: what counts as said, right and untouched. A stand-in answers for the server."""

from collections.abc import Sequence
from typing import Any

from benchmarks.real import facts
from benchmarks.real.facts import BUNDLE, measured
from selector.client import Answer, Message

FACT = {
    "question": "What is our refund window?",
    "answer": "30 days.",
    "same": ["refund window?", "How long may I return it?"],
    "other": ["What is our sick leave?", "What is the refund window?!"],
}


class StandIn:
    """Says the fact to every question with the words "refund window" in it, and else what the model would say.

    To sick leave it says so in other words, once: a judge's request is in the same step.
    """

    is_judging = True

    def ask(self, model: str, messages: Sequence[Message], **_: Any) -> Answer:
        text = messages[-1]["content"]
        found = model == BUNDLE and "refund window" in text
        trace = {"facts": [{"id": "1", "withheld": None}] if found else []} if model == BUNDLE else None
        said = "30 days." if found else "About 4 weeks."
        if model == BUNDLE and "sick leave" in text and self.is_judging:
            said, self.is_judging = "4 weeks, more or less.", False
        return Answer("", said, trace)


def test_what_is_counted() -> None:
    found = measured(StandIn(), [FACT])  # type: ignore[arg-type]
    assert found["kinds"] == {
        "stored": {"asked": 1, "right": 1},
        "second turn": {"asked": 1, "right": 1},
        "other words": {"asked": 2, "right": 1},
        "something else": {"asked": 2, "said": 1, "untouched": 0, "untouched_again": 1},
        "builds on it": {"asked": 1, "said": 0, "right": 1, "untouched": 1},
    }
    assert found["builds_on"] == [
        {"fact": 0, "asked": facts.BUILDS_ON["refund"][0], "awaited": "4", "said": "About 4 weeks."}
    ]
