"""What a running server shows of its bundles: metrics, the state of one bundle, and the model of its name."""

from functools import partial
from pathlib import Path

import httpx
import openai
import pytest
import vllm
from prometheus_client.parser import text_string_to_metric_families

import inducekv_vllm
from inducekv_vllm.bundle import Bundle
from tests.engine.parity import Prompt, World
from tests.server.http import TRACED, Bundles, ask, trace_of


class Metrics:
    """The samples of our metrics, by name and labels."""

    def __init__(self, url: str) -> None:
        text = httpx.get(f"{url}/metrics").text
        self.families = [f for f in text_string_to_metric_families(text) if f.name.startswith("inducekv:")]
        self.samples = [sample for family in self.families for sample in family.samples]

    def __call__(self, name: str, **labels: str) -> float:
        found = [s.value for s in self.samples if s.name == f"inducekv:{name}" and labels.items() <= s.labels.items()]
        assert len(found) == 1, (name, labels, found)
        return found[0]

    def of(self, bundle: str) -> set[str]:
        return {sample.name for sample in self.samples if sample.labels.get("bundle") == bundle}


class TestMetrics:
    def test_of_requests(
        self,
        server: str,
        client: openai.OpenAI,
        bundles: Bundles,
        gated_merged_bundle: tuple[Bundle, Path],
        questions: list[Prompt],
    ) -> None:
        observer = client.with_options(api_key="observer")
        with bundles.loaded("observed", gated_merged_bundle[1]):
            fresh = Metrics(server)
            for gate, task in (("open", "a"), ("open", "b"), ("outside", ""), ("below_threshold", "")):
                assert fresh("requests_total", bundle="observed", gate=gate, task=task) == 0
            margins, closed = [], []
            for prompt in (*questions, questions[0]):
                trace = trace_of(ask(observer, "observed", prompt, extra_body=TRACED, max_tokens=3))
                margins.append(max(trace["gate"]["margins"].values()))
                closed.append(trace["gate"]["closed"])
            seen = partial(Metrics(server), bundle="observed")
            assert seen("requests_total", gate="open", task="a") == 2
            assert seen("requests_total", gate="open", task="b") == 1
            for reason in ("outside", "below_threshold"):
                assert seen("requests_total", gate=reason, task="") == closed.count(reason)
            assert closed.count(None) == 3
            assert [seen("decisions_total", source=each) for each in ("computed", "none")] == [5, 0]
            assert seen("decision_seconds_count") == 5
            for every in ("request_seconds", "time_to_first_token_seconds", "gate_margin"):
                assert seen(f"{every}_count") == 5, every
            assert seen("similarity_count") == 3  # where the gate was open
            assert seen("gate_margin_bucket", le="0.0") == sum(margin <= 0 for margin in margins) == 2
            assert 0 < seen("time_to_first_token_seconds_sum") < seen("request_seconds_sum")
            assert seen("active_requests") == 0
            assert seen("request_failures_total") == 0
        assert Metrics(server).of("observed") == set()

    def test_of_bundles(self, server: str, bundles: Bundles, world: World) -> None:
        before = Metrics(server)
        assert before("build_info", version=inducekv_vllm.__version__, vllm_version=vllm.__version__) == 1

        def grown(metrics: Metrics, name: str, **labels: str) -> float:
            return metrics(name, **labels) - before(name, **labels)

        with bundles.loaded("observed", world.paths["other"]):
            loaded, card = Metrics(server), bundles.cards()["observed"]
            assert loaded("bundle_info", bundle="observed", digest=world.bundles["other"].digest) == 1
            assert loaded("bundle_entries", bundle="observed") == card["entries"]
            assert loaded("resident_bytes", bundle="observed") == card["resident_bytes"]
            assert grown(loaded, "pool_used_bytes") == card["resident_bytes"]
            assert loaded("pool_used_bytes") < loaded("pool_bytes") == before("pool_bytes")
            assert grown(loaded, "changes_total", change="load", outcome="done") == 1
            assert bundles.load("observed", world.paths["second"]).status_code == 400
            assert bundles.load("observed", world.paths["second"], replace=True).status_code == 200
            bundles.wait_until_drained()
            replaced = Metrics(server)
            assert replaced("bundle_info", bundle="observed") == 1  # there is one
            assert replaced("bundle_info", digest=world.bundles["second"].digest, bundle="observed") == 1
            assert grown(replaced, "pool_used_bytes") == 0  # "second" is resident once
            assert grown(replaced, "changes_total", change="load", outcome="refused") == 1
            assert grown(replaced, "change_seconds_count", change="load") == 2
        after = Metrics(server)
        assert after.of("observed") == set()
        assert grown(after, "pool_used_bytes") == 0


def test_a_bundle_is_shown_by_name(server: str, bundles: Bundles) -> None:
    url = f"{server}/v1/memory_bundles"
    card = httpx.get(f"{url}/first", headers=bundles.headers).json()
    assert card == bundles.cards()["first"]
    assert httpx.get(f"{url}/first").json()["path"] is None
    assert httpx.get(f"{url}/team/nobody:1").status_code == 404


def test_a_model_is_retrieved_by_name(client: openai.OpenAI, bundles: Bundles, world: World) -> None:
    listed = {model.id: model for model in client.models.list()}
    for name in ("base", "first"):
        model = client.models.retrieve(name)
        assert (model.id, model.object, model.owned_by) == (name, "model", listed[name].owned_by)
        assert model.model_extra["root"] == listed[name].model_extra["root"]  # type: ignore[index]
    with bundles.loaded("team/odd:name@1", world.paths["other"]):
        assert client.models.retrieve("team/odd:name@1").id == "team/odd:name@1"
    for unknown in ("team/odd:name@1", "nobody"):
        with pytest.raises(openai.NotFoundError, match="does not exist"):
            client.models.retrieve(unknown)


def test_the_server_says_its_versions(server: str) -> None:
    about = httpx.get(f"{server}/v1/memory_server").json()
    assert about["version"] == inducekv_vllm.__version__
    assert about["vllm_version"] == httpx.get(f"{server}/version").json()["version"]
