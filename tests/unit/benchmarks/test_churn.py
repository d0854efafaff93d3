"""The verdicts of the benchmark of changing bundles, and its complete short run (slow)."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.churn.changes import Names, Span
from benchmarks.churn.crowd import BASE, Answer, Crowd, Verdicts


@pytest.fixture
def names() -> Names:
    """`old` until 10, `new` from about 9 on; unloaded at about 20."""
    old = Span("old", asked=0, there=1, left=10, gone=10)
    return Names({"m": [old, Span("new", asked=9, there=10, left=20, gone=21)]})


def test_what_a_request_may_have_had(names: Names) -> None:
    assert names.may_be("m", 2, 8) == {"old"}
    assert names.may_be("m", 2, 9) == {"old", "new"}
    assert names.may_be("m", 11, 12) == {"new"}
    assert names.may_be("m", 22, 30) == set()
    assert names.may_be("other", 0, 30) == set()


ALONE = {("old", 0): Answer(["a", "b"], [-0.5, -1.0]), (BASE, 0): Answer(["c"], [-0.1])}


def response(tokens: list[str], logprobs: list[float], digest: str = "old", status: int = 200) -> httpx.Response:
    steps = [{"token": token, "logprob": value} for token, value in zip(tokens, logprobs, strict=True)]
    answer: dict[str, Any] = {"choices": [{"logprobs": {"content": steps}}]}
    answer["kv_transfer_params"] = {"inducekv": {"digest": digest}}
    return httpx.Response(status, json=answer)


@pytest.mark.parametrize(
    ("model", "span", "answer", "verdict"),
    [
        ("m", (2, 8), response(["a", "b"], [-0.5, -1.00001]), "right"),
        ("m", (2, 8), response(["a", "c"], [-0.5, -1.0]), "other_tokens"),
        ("m", (2, 8), response(["a", "b"], [-0.5, -1.001]), "other_logprobs"),
        ("m", (12, 13), response(["a", "b"], [-0.5, -1.0]), "wrong_version"),
        ("m", (2, 8), response([], [], status=500), "failed"),
        ("m", (2, 8), response([], [], status=404), "failed"),
        ("m", (19, 22), response([], [], status=404), "without_bundle"),
        (BASE, (2, 8), response(["c"], [-0.1]), "right"),
        (BASE, (2, 8), response([], [], status=404), "failed"),
    ],
)
def test_verdicts(names: Names, model: str, span: tuple[float, float], answer: httpx.Response, verdict: str) -> None:
    client: Any = None
    crowd = Crowd(client, [], ["m"], names, ALONE, Verdicts())
    found, _ = crowd._verdict(model, 0, *span, answer)
    assert found == verdict
    crowd.verdicts.add(found)
    assert bool(crowd.verdicts.faults) == (verdict not in ("right", "without_bundle"))


@pytest.mark.slow
def test_a_short_run_passes(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.churn.run", "--requests", "300"]
    done = subprocess.run([*command, "--output", str(tmp_path / "result.json")], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "result.json").read_bytes())
    assert result["verdicts"]["right"] > 300
    assert result["preemptions"] > 0
