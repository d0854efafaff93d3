"""The benchmark of many bundles finds an answer that is not the bundle's own, and takes either one while it changes."""

import json
import random
import time

import httpx
import pytest

from benchmarks.fleet.bundles import KINDS, made
from benchmarks.fleet.traffic import SETTLED_S, Expected, Fleet, Reply, first_tokens
from inducekv_vllm.backbone.fact_reader import FactReader
from server.demo import CHECKPOINT

pytestmark = pytest.mark.anyio


def answered(text: str, status: int = 200) -> httpx.AsyncClient:
    """A client of a server that always answers this."""

    def answer(request: httpx.Request) -> httpx.Response:
        parts = [json.dumps({"choices": [{"delta": {"content": each}}]}) for each in ("", *text)]
        return httpx.Response(status, text="".join(f"data: {part}\n\n" for part in parts) + "data: [DONE]\n\n")

    return httpx.AsyncClient(transport=httpx.MockTransport(answer), base_url="http://server")


async def test_every_answer_is_compared_with_the_bundles_own() -> None:
    reader = FactReader.of(CHECKPOINT)
    members = [made(reader, number, random.Random(number))[0] for number in range(len(KINDS))]
    assert [member.kind for member in members] == list(KINDS)
    expected = Expected()
    for member in members:
        expected.publish(member.name, member.answer or "alone")
    (facts, task, _) = members
    assert facts.answer is not None
    for member, text, verdict in (
        (facts, facts.answer, "right"),
        (facts, f"{facts.answer} and more", "right"),
        (task, "alone", "right"),
        (facts, "alone", "wrong"),
        (task, facts.answer, "wrong"),
        (task, "", "wrong"),
    ):
        fleet = Fleet(answered(text), members, expected)
        await fleet.ask(member)
        assert fleet.counts == {verdict: 1}
        assert len(fleet.faults) == (verdict != "right")
    fleet = Fleet(answered("", status=503), members, expected)
    await fleet.ask(facts)
    assert fleet.counts == {"failed": 1}


def test_while_a_bundle_is_published_either_version_may_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    expected, now = Expected(), 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    expected.publish("m", "old")
    now = 200.0
    expected.publish("m", "new")
    assert expected.may_be("m", 199.0) == {"old", "new"}  # a request that ends after the change
    assert expected.may_be("m", 200.0 + SETTLED_S / 2) == {"old", "new"}
    assert expected.may_be("m", 200.0 + SETTLED_S) == {"new"}


def test_percentiles() -> None:
    replies = [Reply(200, "a", milliseconds / 1e3) for milliseconds in range(1, 101)] + [Reply(404, "", 9.0)]
    assert first_tokens(replies) == {"requests": 100, "p50_ms": 51.0, "p99_ms": 100.0}
    assert first_tokens([]) == {"requests": 0}
