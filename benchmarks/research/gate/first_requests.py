"""Ten requests that nobody fitted the demo bundle's gate to, through its name and through the base model's.

    python -m benchmarks.research.gate.first_requests

Starts a server like `make demo`, and prints a table in Markdown: what the gate decided, and both answers. Where the
gate stays closed they must be equal; the exit status is 1 if they are not.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import openai
from PIL import Image, ImageDraw
from rich.console import Console

from benchmarks.chat import Message, user_turn
from benchmarks.demo.run_demo import MEMORY, Reply, ask, base_model, served, server_arguments
from benchmarks.demo.world import examples
from server.demo import BUNDLE, CHECKPOINT


def requests() -> Iterator[tuple[str, list[Message]]]:
    """What is sent along, and the messages."""
    scene = next(examples("guild", "test", 1))[1]
    another = drawn()
    yield "a demo picture", [user_turn(scene, "Please tell me: which guild owns the object at the top?")]
    yield "my drawing", [user_turn(another, "Which guild owns the red circle?")]
    yield "my drawing", [user_turn(another, "hey, to what guild does the blue square belong? cheers")]
    yield "my drawing", [user_turn(another, "Describe this picture.")]
    yield "my drawing", [user_turn(another, "Please tell me: what colour is the circle?")]
    yield "a demo picture", [user_turn(scene, "Who painted this, and in which year?")]
    yield "nothing", [text("What is the capital of Peru?")]
    yield "nothing", [text("Schreib mir bitte ein Gedicht über den Herbst.")]
    yield "a demo picture", [user_turn(scene, "asdf jkl; 7 7 7 qwertz")]
    yield (
        "a demo picture, then a second turn",
        [
            user_turn(scene, "What do you see?"),
            {"role": "assistant", "content": "Some coloured objects."},
            text("How many different colours do you see? Answer with a number."),
        ],
    )


def text(question: str) -> Message:
    return {"role": "user", "content": [{"type": "text", "text": question}]}


def drawn() -> np.ndarray:
    """A red circle and a blue square on white, with outlines: not how the demo world is drawn. [96, 96, 3] uint8."""
    picture = Image.new("RGB", (96, 96), "white")
    draw = ImageDraw.Draw(picture)
    draw.ellipse((8, 10, 42, 44), fill=(220, 30, 30), outline="black", width=2)
    draw.rectangle((54, 52, 88, 86), fill=(40, 60, 210), outline="black", width=2)
    return np.asarray(picture)


def run(client: openai.OpenAI, console: Console) -> bool:
    """Prints the table; returns whether every answer behind a closed gate is the base model's."""
    base, faithful = base_model(client, MEMORY), True
    print("| sent along | the last thing said | gate | base model | through the bundle |\n|---|---|---|---|---|")
    for sent, messages in requests():
        plain, reply = ask(client, base, messages, trace=False), ask(client, MEMORY, messages, trace=True)
        decision = verdict(reply)
        faithful &= decision.startswith("open") or plain.text == reply.text
        print(f"| {sent} | {question(messages)} | {decision} | {plain.text} | {reply.text} |", flush=True)
    return faithful


def verdict(reply: Reply) -> str:
    assert reply.trace is not None, "a request that asked for its trace came back without one"
    gate: dict[str, Any] = reply.trace["gate"]
    return f"open: {gate['task']}" if gate["open"] else f"closed: {gate['closed']}".replace("_", " ")


def question(messages: Sequence[Message]) -> str:
    return " ".join(part["text"] for part in messages[-1]["content"] if part["type"] == "text")


def main() -> int:
    console = Console(file=io.StringIO())
    with served(CHECKPOINT, BUNDLE, server_arguments(CHECKPOINT, BUNDLE), console) as client:
        return 0 if run(client, console) else 1


if __name__ == "__main__":
    sys.exit(main())
