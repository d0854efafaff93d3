"""`--memory-shared`: requests to any bundle have one more memory; each says so, and all can do without it."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
import torch

from inducekv_vllm.bundle import Bundle, write_bundle
from inducekv_vllm.files.audit_chain import read
from tests.engine.parity import TOLERANCE, Prompt, World, prompts
from tests.reference import reference_logprobs
from tests.server.http import Bundles, ask, tokens_and_logprobs, trace_at, trace_of
from tests.server.launch import FOUND, STATE, Adapted


class Tenants:
    """A server of the bundles "acme" and "bolt" that share "manual"; "third" is found by its resolver."""

    def __init__(self, adapted: Adapted) -> None:
        self.url, self.world, self.folder, self.admin = adapted.url, adapted.plain, adapted.folder, Bundles(adapted.url)
        self.by_digest = {bundle.digest: bundle for bundle in self.world.bundles.values()}

    def ask(self, model: str, prompt: Prompt, memories: list[str] | None = None, **options: Any) -> Any:
        xargs: dict[str, Any] = {} if model == "base" else {"inducekv_trace": 1}
        xargs |= {} if memories is None else {"inducekv_memories": memories}
        key = options.pop("api_key", "none")
        with openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=300) as client:
            return ask(client, model, prompt, extra_body={"vllm_xargs": xargs}, **options)

    def check(self, response: Any, prompt: Prompt, *expected: Bundle | None) -> None:
        """Against transformers: own(shared(self-attention)); `expected` None for what the trace says."""
        tokens, logprobs = tokens_and_logprobs(response)
        inputs = self.world.backbone.encode(prompt.chat_messages, prompt.images)
        own, shared = expected or self.versions(response)
        reference = reference_logprobs(self.world.backbone, own, inputs, tokens, beneath=shared)
        assert (torch.tensor(logprobs) - reference).abs().max() <= TOLERANCE

    def versions(self, response: Any) -> tuple[Bundle, Bundle | None]:
        trace = trace_of(response)
        shared = trace["shared"] and self.by_digest[trace["shared"]["digest"]]
        return self.by_digest[trace["digest"]], shared


NAMES = {"manual": "first", "acme": "second", "bolt": "other", "merged": "prior"}


@pytest.fixture(scope="module")
def tenants(adapted: Adapted) -> Iterator[Tenants]:
    tenants = Tenants(adapted)
    write_bundle(tenants.world.bundles["other"], tenants.folder / FOUND / "third.safetensors")
    for name in ("acme", "bolt", "merged"):
        tenants.admin.server.load(name, tenants.world.paths[NAMES[name]], replace=False)
    yield tenants
    for name in ("acme", "bolt", "merged", "third"):
        tenants.admin.unload(name)
    tenants.admin.wait_until_drained()


@pytest.fixture
def world(tenants: Tenants) -> World:
    return tenants.world


def names_of(response: Any) -> list[str]:
    trace = trace_of(response)
    return [trace["bundle"], *([trace["shared"]["bundle"]] if trace["shared"] else [])]


def test_a_request_has_both_and_may_name_others(tenants: Tenants, world: World) -> None:
    manual, acme, bolt = (world.bundles[NAMES[name]] for name in ("manual", "acme", "bolt"))
    (prompt,) = prompts(1, seed=71)
    before = tenants.ask("base", prompt)
    tenants.check(before, prompt, None, None)
    for model, listed, own, shared in (
        ("acme", None, acme, manual),
        ("bolt", None, bolt, manual),
        ("manual", None, manual, None),
        ("acme", ["acme"], acme, None),
        ("acme", ["acme", "bolt"], acme, bolt),
        ("bolt", ["bolt", "acme"], bolt, acme),
        ("acme", ["acme", "third"], acme, bolt),  # the resolver's is a copy of it
        ("bolt", ["bolt", "third"], bolt, None),  # one content acts once
        (f"acme@{acme.digest[:12]}", None, acme, manual),
    ):
        response = tenants.ask(model, prompt, listed)
        tenants.check(response, prompt, own, shared)
        assert tenants.versions(response) == (own, shared)
        assert names_of(response) == (listed or [model.partition("@")[0], "manual"])[: 1 if shared is None else 2]
    assert tokens_and_logprobs(tenants.ask("base", prompt)) == tokens_and_logprobs(before)


def test_a_trace_has_both_and_is_its_owners(tenants: Tenants) -> None:
    (prompt,) = prompts(1, seed=75)
    response = tenants.ask("acme", prompt, api_key="of acme")
    trace = trace_of(response)
    assert (trace["bundle"], trace["shared"]["bundle"]) == ("acme", "manual")
    assert trace.keys() - trace["shared"].keys() == {"shared", "timings"}
    assert [each["gate"]["task"] for each in (trace, trace["shared"])] == ["t", "t"]
    url = f"{tenants.url}/v1"
    assert trace_at(url, response.id, "of acme").json()["traces"] == [trace]
    assert trace_at(url, response.id, "of bolt").status_code == 404
    records = [json.loads(line) for _, line in read(tenants.folder / STATE)]
    *_, recorded = (record for record in records if record["event"] == "answer")
    assert (recorded["name"], recorded["shared"]["name"]) == ("acme", "manual")
    assert recorded["shared"]["entries"] == {entry["id"]: entry["weight"] for entry in trace["shared"]["entries"]}
    metrics = httpx.get(f"{tenants.url}/metrics").text
    for name in ("acme", "manual"):
        assert f'inducekv:time_to_first_token_seconds_count{{bundle="{name}"}}' in metrics


@pytest.mark.parametrize(
    ("model", "memories", "status", "reason"),
    [
        ("acme", ["manual", "acme"], 400, "must be a list of names that begins with the request's model, 'acme'"),
        ("acme", [], 400, "must be a list of names"),
        ("acme", ["acme", 3], 400, "must be a list of names"),
        ("acme", ["acme", "bolt", "manual"], 400, "has 3 names, and a request to this server may have 2"),
        ("acme", ["acme", "nobody"], 404, "no memory bundle 'nobody' is loaded"),
        ("merged", None, 400, "a memory bundle that is merged into self-attention cannot act beside another one"),
        ("base", ["base", "manual"], 400, "the request's model has no memory"),
    ],
)
def test_what_cannot_be_is_refused(
    tenants: Tenants, model: str, memories: list[str] | None, status: int, reason: str
) -> None:
    (prompt,) = prompts(1, seed=76)
    with pytest.raises(openai.APIStatusError, match=reason) as refused:
        tenants.ask(model, prompt, memories)
    assert refused.value.status_code == status


def test_merged_memory_answers_alone_and_is_not_shared(tenants: Tenants, world: World) -> None:
    (prompt,) = prompts(1, seed=77)
    tenants.check(tenants.ask("merged", prompt, ["merged"]), prompt, world.bundles["prior"], None)
    refused = tenants.admin.load("manual", world.paths["prior"], replace=True)
    assert (refused.status_code, "it cannot be shared" in refused.text) == (400, True)


def test_without_the_shared_one_there_is_no_silent_answer(tenants: Tenants, world: World) -> None:
    (question,) = prompts(1, seed=78)
    path = world.paths["first"]
    assert tenants.admin.unload("manual").status_code == 200
    with pytest.raises(openai.NotFoundError, match="no memory bundle 'manual' is loaded"):
        tenants.ask("acme", question)
    tenants.check(tenants.ask("acme", question, ["acme"]), question, world.bundles["second"], None)
    assert tenants.admin.load("manual", path, pin=True).status_code == 200
    tenants.check(tenants.ask("acme", question), question, world.bundles["second"], world.bundles["first"])
