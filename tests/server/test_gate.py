"""A memory behind a relevance gate, over HTTP: open and closed, the trace and the counters."""

from collections.abc import Iterator

import openai
import pytest

from inducekv_vllm.bundle import Bundle
from tests.engine.parity import TOLERANCE, Prompt, World
from tests.server.http import TRACED, Bundles, ask, deviation, tokens_and_logprobs, trace_at, trace_of
from tests.server.launch import GATED_TASKS


@pytest.fixture(scope="module", params=["gated_bundle", "gated_merged_bundle"], ids=["default", "merged"])
def gated(bundles: Bundles, request: pytest.FixtureRequest) -> Iterator[Bundle]:
    """Served as "gated"."""
    bundle, path = request.getfixturevalue(request.param)
    with bundles.loaded("gated", path):
        yield bundle


def test_answers_equal_the_reference_open_and_closed(
    client: openai.OpenAI, world: World, gated: Bundle, questions: list[Prompt]
) -> None:
    for prompt, task in zip(questions, GATED_TASKS, strict=True):
        response = ask(client, "gated", prompt, extra_body=TRACED)
        assert response.model == "gated"
        assert deviation(world, response, prompt, gated) <= TOLERANCE
        trace = trace_of(response)
        assert trace["gate"]["open"] == (task is not None)
        assert trace["gate"]["task"] == task
        assert (trace["gate"]["closed"] in ("outside", "below_threshold")) == (task is None)
        assert (trace["gate"]["closed"] is None) == (task is not None)
        assert {name: margin > 0 for name, margin in trace["gate"]["margins"].items()} == {
            name: name == task for name in ("a", "b")
        }
        assert {entry["task"] for entry in trace["entries"]} == ({task} if task else set())
        assert trace_at(str(client.base_url), response.id).json()["traces"] == [trace]
        # Closed, the answer is the untouched model's; open, it is far from it.
        assert (deviation(world, response, prompt, None) <= TOLERANCE) == (task is None)


def test_a_closed_gate_answers_as_the_base_model_that_has_seen_the_prompt(
    client: openai.OpenAI, gated: Bundle, questions: list[Prompt]
) -> None:
    """Untraced, streamed by others or not: the very same numbers as under the base model's name."""
    ask(client, "gated", questions[1])  # from here on both have the same prefix cache
    with_gate, plain = ask(client, "gated", questions[1]), ask(client, "base", questions[1])
    assert tokens_and_logprobs(with_gate) == tokens_and_logprobs(plain)
    assert with_gate.usage == plain.usage
