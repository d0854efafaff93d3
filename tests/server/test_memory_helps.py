"""The demo bundle on a server: it answers its task's questions, and the base's as the model does without it."""

import io
from collections.abc import Iterator
from itertools import islice
from typing import Any

import openai
import pytest
from rich.console import Console

from benchmarks.chat import Message, question_of, same_answer, user_turn
from benchmarks.demo.run_demo import MEMORY, ask, base_model, gate_is_open, served, server_arguments
from benchmarks.demo.world import BASE, examples
from server.demo import BUNDLE, CHECKPOINT
from tests.engine.parity import FEWER_PROCESSES

QUESTIONS = 30


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    arguments = [*server_arguments(CHECKPOINT, BUNDLE), "--enforce-eager"]  # compilation would take a minute
    with pytest.MonkeyPatch.context() as patch:
        for name, value in FEWER_PROCESSES.items():
            patch.setenv(name, value)
        with served(CHECKPOINT, BUNDLE, arguments, Console(file=io.StringIO())) as found:
            yield found


def questions(task: str) -> Iterator[tuple[list[Message], str]]:
    """Of the test split: the messages, and the answer."""
    for record, pixels in islice(examples(task, "test", QUESTIONS), QUESTIONS):
        yield [user_turn(pixels, question_of(record))], record["answer"]


def right(client: openai.OpenAI, model: str, task: str) -> float:
    """The share of questions that are answered right."""
    asked = list(questions(task))
    return sum(same_answer(ask(client, model, m, trace=False).text, answer) for m, answer in asked) / len(asked)


def test_memory_teaches_a_task(client: openai.OpenAI) -> None:
    assert right(client, MEMORY, "guild") >= 0.9
    assert right(client, base_model(client, MEMORY), "guild") < 0.5


def test_behind_a_closed_gate_every_letter_is_the_base_models(client: openai.OpenAI) -> None:
    base, traces = base_model(client, MEMORY), list[dict[str, Any]]()
    for messages, _ in questions(BASE):
        reply = ask(client, MEMORY, messages, trace=True)
        assert reply.trace is not None
        traces.append(reply.trace)
        if not gate_is_open(reply.trace):
            assert reply.text == ask(client, base, messages, trace=False).text
    assert sum(map(gate_is_open, traces)) <= 0.1 * QUESTIONS
