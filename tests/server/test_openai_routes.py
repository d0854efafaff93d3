"""vLLM's own OpenAI routes with a bundle as the model, through the official client."""

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import httpx
import openai
import pytest

from tests.engine.parity import TOLERANCE, World, prompts
from tests.server.http import TRACED, Bundles, ask, deviation, tokens_and_logprobs, trace_at, trace_of


def test_a_bundle_is_a_model(client: openai.OpenAI, world: World) -> None:
    models = {model.id: model.model_extra for model in client.models.list()}
    assert models["base"]["parent"] is None
    for name in ("first", "second"):
        assert models[name]["parent"] == "base"
        assert models[name]["root"] == world.bundles[name].digest


@pytest.fixture(scope="module", params=["first", "prior"], ids=["default", "merged"])
def served(request: pytest.FixtureRequest, bundles: Bundles, world: World) -> Iterator[str]:
    """The name of a bundle in each form."""
    name: str = request.param
    with nullcontext() if name in bundles.cards() else bundles.loaded(name, world.paths[name]):
        yield name


@pytest.mark.parametrize(
    ("name", "top_k"),
    [("first", None), ("second", None), ("other", None), ("sqrt", None), ("sqrt", 3), ("prior", None), ("prior", 3)],
)
def test_answers_equal_the_reference(
    client: openai.OpenAI, bundles: Bundles, world: World, name: str, top_k: int | None
) -> None:
    extra = {"vllm_xargs": {} if top_k is None else {"inducekv_top_k": top_k}}
    with nullcontext() if name in bundles.cards() else bundles.loaded(name, world.paths[name]):
        for prompt in prompts(3, seed=1):
            response = ask(client, name, prompt, extra_body=extra)
            assert response.model == name
            assert deviation(world, response, prompt, world.bundles[name], top_k=top_k) <= TOLERANCE


def test_the_base_name_is_the_model_without_memory(client: openai.OpenAI, world: World) -> None:
    for prompt in prompts(3, seed=1):
        response = ask(client, "base", prompt)
        assert deviation(world, response, prompt, None) <= TOLERANCE
        # Far from every memory: the tests above would fail if memory were left out, and this one if it leaked in.
        assert deviation(world, response, prompt, world.bundles["first"]) > 100 * TOLERANCE


@pytest.mark.parametrize("route", ["sleep", "sleep?level=0", "release_kv_cache_memory"])
def test_vllms_routes_for_developers_refuse_sleep(client: openai.OpenAI, server: str, route: str) -> None:
    refused = httpx.post(f"{server}/{route}")
    assert refused.status_code == 400
    assert "sleep mode: what becomes of the memory pool" in refused.json()["error"]["message"]
    assert httpx.get(f"{server}/is_sleeping").json() == {"is_sleeping": False}
    assert ask(client, "first", prompts(1, seed=3)[0]).choices


class TestTrace:
    def test_describes_the_injection(self, client: openai.OpenAI, server: str, world: World, served: str) -> None:
        (prompt,) = prompts(1, seed=2)
        response = ask(client, served, prompt, extra_body=TRACED)
        trace = trace_of(response)
        bundle = world.bundles[served]
        weighting = bundle.metadata.weighting
        assert (trace["bundle"], trace["digest"], trace["weighting"]) == (served, bundle.digest, weighting)
        weights = [entry["weight"] for entry in trace["entries"]]
        assert len(weights) == bundle.num_entries
        assert sum(weights) == pytest.approx(len(weights) if weighting == "uniform" else 1, abs=1e-5)
        assert weights == sorted(weights, reverse=True)
        for entry in trace["entries"]:
            record = bundle.metadata.entries[entry["index"]]
            assert (entry["id"], entry["task"]) == (record.id, record.task)
        assert trace["timings"]["decision_source"] == "computed"
        for name in ("decision_ms", "request_ms"):
            assert trace["timings"][name] > 0
        assert trace_at(f"{server}/v1", response.id).json()["traces"] == [trace]

    def test_of_a_stream(self, client: openai.OpenAI, server: str, world: World, served: str) -> None:
        (prompt,) = prompts(1, seed=4)
        nearest = {"inducekv_top_k": 2} if world.bundles[served].metadata.form == "merged" else {}
        *_, last = ask(client, served, prompt, stream=True, extra_body={"vllm_xargs": {"inducekv_trace": 1, **nearest}})
        (trace,) = trace_at(f"{server}/v1", last.id).json()["traces"]
        assert len(trace["entries"]) == (2 if nearest else 12)
        assert trace["bundle"] == served

    def test_of_a_completion_with_two_prompts(self, client: openai.OpenAI, server: str) -> None:
        response = client.completions.create(
            model="first", prompt=["How many squares?", "yes no"], max_tokens=4, extra_body=TRACED
        )
        assert trace_of(response)["bundle"] == "first"
        assert len(trace_at(f"{server}/v1", response.id).json()["traces"]) == 2


class TestEveryKindOfAnswer:
    def test_a_stream_has_the_same_text(self, client: openai.OpenAI, served: str) -> None:
        for prompt in prompts(2, seed=5):
            whole = ask(client, served, prompt)
            parts = [part for part in ask(client, served, prompt, stream=True) if part.choices]
            assert "".join(part.choices[0].delta.content or "" for part in parts) == whole.choices[0].message.content
            assert {part.model for part in parts} == {served}

    def test_several_samples(self, client: openai.OpenAI, world: World, served: str) -> None:
        (prompt,) = prompts(1, seed=6)
        response = ask(client, served, prompt, n=3, temperature=1.0, seed=7)
        assert len(response.choices) == 3
        assert len({tuple(tokens_and_logprobs(response, i)[0]) for i in range(3)}) > 1
        for choice in range(3):
            assert deviation(world, response, prompt, world.bundles[served], choice=choice) <= TOLERANCE

    def test_prompt_logprobs_are_the_base_models_or_refused(self, client: openai.OpenAI, served: str) -> None:
        question: dict[str, Any] = {"prompt": "How many squares are there?", "extra_body": {"prompt_logprobs": 0}}
        base = client.completions.create(model="base", max_tokens=1, **question)
        assert len(base.choices[0].model_extra["prompt_logprobs"]) > 2  # type: ignore[index]
        with pytest.raises(openai.BadRequestError, match="log-probabilities of the prompt cannot be had"):
            client.completions.create(model=served, max_tokens=1, **question)

    @pytest.mark.parametrize(
        ("path", "question"),
        [
            ("responses", {"input": "How many squares?", "max_output_tokens": 8}),
            ("messages", {"messages": [{"role": "user", "content": "How many squares?"}], "max_tokens": 8}),
        ],
    )
    def test_other_protocols(self, server: str, path: str, question: dict[str, Any]) -> None:
        body = question | {"model": "first", "temperature": 0} | TRACED
        response = httpx.post(f"{server}/v1/{path}", json=body, timeout=300)
        assert response.status_code == 200, response.text
        assert response.json()["model"] == "first"
        (trace,) = httpx.get(f"{server}/v1/memory_trace/{response.json()['id']}").json()["traces"]
        assert trace["bundle"] == "first"


class TestRefusals:
    """Each is a 4xx with a message that names the problem, also for a stream, and the server serves on."""

    @pytest.mark.parametrize("stream", [False, True])
    @pytest.mark.parametrize(
        ("model", "xargs", "message"),
        [
            ("first", {"inducekv_topk": 2}, "unknown argument 'inducekv_topk'"),
            ("first", {"inducekv_top_k": 2}, "the memory gives a request all entries of its task"),
            ("first", {"inducekv_trace": 2}, "must be 0 or 1"),
            ("first", {"inducekv": "x"}, "reserved"),
            ("base", {"inducekv": "x"}, "reserved"),
            ("base", {"inducekv_trace": 1}, "has no memory"),
        ],
    )
    def test_of_arguments(self, client: openai.OpenAI, model: str, xargs: dict, message: str, stream: bool) -> None:
        with pytest.raises(openai.BadRequestError, match=message):
            ask(client, model, prompts(1, seed=8)[0], extra_body={"vllm_xargs": xargs}, stream=stream)
        assert ask(client, "base", prompts(1, seed=8)[0], max_tokens=1).choices

    def test_of_beam_search(self, client: openai.OpenAI) -> None:
        beams = {"use_beam_search": True}
        with pytest.raises(openai.BadRequestError, match="beam search"):
            client.completions.create(model="first", prompt="yes", n=2, max_tokens=3, extra_body=beams)
        assert client.completions.create(model="base", prompt="yes", n=2, max_tokens=3, extra_body=beams).choices
