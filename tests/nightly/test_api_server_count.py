"""Real servers with `--api-server-count 2`, under requests: two ranks of tensor parallelism, and two engines."""

import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import httpx
import openai
import psutil
import pytest

from benchmarks.server_process import serving
from inducekv_vllm.bundle import Bundle, write_bundle
from inducekv_vllm.files import audit_chain
from tests.bundles import remade
from tests.engine.parity import TOLERANCE, World, prompts
from tests.server.http import TRACED, Bundles, ask, deviation, trace_at, trace_of, wait_until
from tests.server.launch import ENVIRONMENT, FLAGS, process_of

pytestmark = pytest.mark.slow
CLIENTS = 8
VERSIONS = 6
# vLLM on CPUs reads the number of API servers as one of data-parallel ranks when it shares out the cores by itself.
KINDS = {
    "ranks": (["--tensor-parallel-size", "2"], {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}),
    "engines": (["--data-parallel-size", "2"], {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}),
}


@dataclass(frozen=True)
class Running:
    url: str
    folder: Path  # has state and log
    kind: str

    def connections(self, process: str) -> int:
        """How many clients an API process has."""
        connections = psutil.Process(process_of(self.folder / "log", process)).net_connections()
        port = httpx.URL(self.url).port
        return sum(c.status == psutil.CONN_ESTABLISHED and c.laddr.port == port for c in connections)


@pytest.fixture(scope="module", params=list(KINDS))
def running(
    request: pytest.FixtureRequest, world: World, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Running]:
    folder, (flags, environment) = tmp_path_factory.mktemp("several"), KINDS[request.param]
    kept = [f"--memory-state={folder / 'state'}"]
    arguments = [str(world.model), "--served-model-name", "base", f"--memory=m={world.paths['first']}", *kept]
    arguments += ["--memory-audit-answers", "--memory-root", str(folder), *FLAGS]
    arguments += ["--api-server-count", "2", *flags]
    with serving(arguments, folder / "log", {**ENVIRONMENT, **environment}) as url:
        yield Running(url, folder, request.param)


def written(bundle: Bundle, path: Path) -> Path:
    write_bundle(bundle, path)
    return path


def renamed(bundle: Bundle, entry_id: str) -> Bundle:
    """Another version with the same answers: its first entry has another id."""
    first, *rest = bundle.metadata.entries
    return remade(bundle, entries=(first.model_copy(update={"id": entry_id}), *rest))


def test_answers_are_those_of_the_bundle_whichever_process_gives_them(running: Running, world: World) -> None:
    for number, prompt in enumerate(prompts(CLIENTS, seed=51)):
        with openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0, timeout=300) as client:
            answer = ask(client, "m", prompt, extra_body=TRACED)
            assert deviation(world, answer, prompt, world.bundles["first"]) <= TOLERANCE
            if number % 2:
                assert deviation(world, ask(client, "base", prompt), prompt, None) <= TOLERANCE
        for _ in range(4):  # each time another connection, of either process
            (found,) = trace_at(f"{running.url}/v1", answer.id).json()["traces"]
            assert found["digest"] == trace_of(answer)["digest"] == world.bundles["first"].digest
    lines = httpx.get(f"{running.url}/metrics").text.splitlines()  # sums over both processes
    assert f'inducekv:decisions_total{{bundle="m",source="computed"}} {CLIENTS}.0' in lines
    engines = {line.partition('engine="')[2][:1] for line in lines if line.startswith("vllm:prompt_tokens_total{")}
    assert engines == ({"0", "1"} if running.kind == "engines" else {"0"})


def test_no_answer_is_of_an_older_version_than_one_before_it(running: Running, world: World) -> None:
    bundles = Bundles(running.url)
    versions = [renamed(world.bundles["first"], f"version-{number}") for number in range(VERSIONS)]
    paths = [written(bundle, running.folder / f"{number}.safetensors") for number, bundle in enumerate(versions)]
    number_of = {bundle.digest: number for number, bundle in enumerate(versions)}
    assert bundles.load("m", paths[0], replace=True).is_success
    answers: list[tuple[float, float, int]] = []  # began, ended, version
    acknowledged: list[tuple[float, int]] = [(0.0, 0)]
    is_done = threading.Event()
    body = {"model": "m", "prompt": "yes no 1 2", "max_tokens": 1, **TRACED}

    def read() -> None:
        # Every question has a connection of its own, which either process may take.
        with httpx.Client(timeout=300, limits=httpx.Limits(max_keepalive_connections=0)) as client:
            while not is_done.is_set():
                began = time.monotonic()
                answer = client.post(f"{running.url}/v1/completions", json=body)
                assert answer.status_code == 200, answer.text
                digest = answer.json()["kv_transfer_params"]["inducekv"]["digest"]
                answers.append((began, time.monotonic(), number_of[digest]))

    with ThreadPoolExecutor(CLIENTS) as pool:
        reading = [pool.submit(read) for _ in range(CLIENTS)]
        try:
            wait_until(lambda: len(answers) > CLIENTS)
            wait_until(lambda: min(running.connections(f"ApiServer_{process}") for process in (0, 1)) > 0)
            for number in range(1, VERSIONS):
                answer = bundles.load("m", paths[number], replace=True)
                assert answer.status_code == 200, answer.text
                acknowledged.append((time.monotonic(), number))
                before = len(answers)  # each client may have one question under way that is older than this
                wait_until(lambda before=before: len(answers) > before + CLIENTS)  # type: ignore[misc]
        finally:
            is_done.set()
        for each in reading:
            each.result()
    for began, _, version in answers:
        assert version >= max(number for moment, number in acknowledged if moment <= began)
        ended_before = [other for _, ended, other in answers if ended <= began]
        assert version >= max(ended_before, default=0)
    assert {version for *_, version in answers} >= {0, VERSIONS - 1}
    bundles.wait_until_drained()
    recorded = [json.loads(record) for _, record in audit_chain.read(running.folder / "state")]
    of_versions = [record for record in recorded if record["event"] == "answer" and record["digest"] in number_of]
    assert len(of_versions) == len(answers)


def test_a_server_without_one_of_its_processes_ends(running: Running) -> None:
    """The last test: what is left of it would know nothing of later changes."""
    main, other = (psutil.Process(process_of(running.folder / "log", each)) for each in ("MainProcess", "ApiServer_1"))
    other.kill()
    wait_until(lambda: not main.is_running() or main.status() == psutil.STATUS_ZOMBIE, seconds=300)
    with pytest.raises(httpx.TransportError):
        httpx.get(f"{running.url}/health")
