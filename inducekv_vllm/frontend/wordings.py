"""Other wordings of a question, asked of the model that serves: an ordinary request, behind those of users."""

from __future__ import annotations

from typing import Any, Final

from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams

PRIORITY: Final = 1 << 20  # the larger, the later; it counts with --scheduling-policy priority
MAX_TOKENS: Final = 48  # a wording has at most 100 bytes
SAMPLES: Final = 2  # for each wording that is wanted: many say another thing
ROOMY: Final = 512  # tokens of a context
ASK: Final = "Ask the same question in other words: "
SHOWN: Final = (
    ("How tall is the Eiffel Tower?", "What is the height of the Eiffel Tower?"),
    ("Who wrote Hamlet?", "Who is the author of Hamlet?"),
    ("When does the office in Rome open?", "At what time does the Rome office open?"),
)


def wording_messages(question: str, context: int) -> list[Any]:
    """The conversation that asks for one, with a few that are answered.

    Args:
        context: tokens that the model takes; a short one has room for the shortest of these.
    """
    shown = SHOWN if context >= ROOMY else [min(SHOWN, key=lambda turn: len("".join(turn)))]
    turns = [(("user", f"{ASK}{asked}"), ("assistant", said)) for asked, said in shown]
    messages = [message for turn in turns for message in turn] + [("user", f"{ASK}{question}")]
    return [{"role": role, "content": content} for role, content in messages]


def wording_params(count: int) -> SamplingParams:
    """For `count` wordings; the same at every call."""
    return SamplingParams(
        n=SAMPLES * count,
        temperature=0.8,
        top_p=0.95,
        seed=0,
        stop=["\n"],
        max_tokens=MAX_TOKENS,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def wordings_in(output: RequestOutput) -> list[str]:
    """What the model has said, each text once."""
    texts = [completion.text.strip().strip('"').strip() for completion in output.outputs]
    return [text for text in dict.fromkeys(texts) if text]
