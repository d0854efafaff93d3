"""A document's memory is served like any other: asked for by name, kept out elsewhere, replaced by its next version."""

from pathlib import Path
from typing import Any

import openai
import pytest

import selector
from benchmarks.server_process import serving
from inducekv_vllm.bundle import Bundle, write_bundle
from inducekv_vllm.frontend.offline import MemoryLLM
from selector.backbone.model import Backbone
from tests.engine import parity
from tests.engine.parity import EAGER, FEWER_PROCESSES, TOLERANCE, Prompt, World
from tests.gates import small_fits
from tests.server.http import TRACED, Bundles, ask, deviation, tokens_and_logprobs, trace_of
from tests.server.launch import ENVIRONMENT, FLAGS

NAME = "valves"
TEXT = "\n\n".join(
    f"The {name} valve of the plant opens at {bar} bar. It is checked every {days} days by the {team} team."
    for name, bar, days, team in (
        ("kestrel", 37, 12, "north"),
        ("plover", 52, 30, "south"),
        ("dunlin", 18, 45, "harbour"),
        ("avocet", 64, 90, "mill"),
    )
)
FEW: dict[str, Any] = {"asked": 1, "precision": "float32"}
ABOUT = Prompt(None, f'Write this sentence of "{NAME}" and fill in the blank: The ____ valve of the plant opens.')
ELSE = Prompt(None, "What colour is the circle?")
FACT = ("At how many bar does the kestrel valve open?", "37")
Version = tuple[Bundle, Path]


def learned(backbone: Backbone, folder: Path) -> tuple[Version, Version]:
    """The memory of two documents, and of their next version."""
    pumps = selector.Document("pumps", TEXT.replace("valve", "pump").replace("checked", "oiled"))
    with small_fits():
        old = selector.teach_document(backbone, [selector.Document(NAME, TEXT), pumps], payload_tokens=16, **FEW)
        next_text = selector.Document(NAME, TEXT.replace("37", "38"))
        new = selector.teach_document(backbone, [next_text, pumps], previous=old, **FEW)
    paths = (folder / "old.safetensors", folder / "new.safetensors")
    for taught, path in zip((old, new), paths, strict=True):
        write_bundle(taught.bundle, path)
    assert new.bundle.metadata.parent_digest == old.bundle.digest != new.bundle.digest
    return (old.bundle, paths[0]), (new.bundle, paths[1])


@pytest.fixture(scope="module")
def versions(world: World, tmp_path_factory: pytest.TempPathFactory) -> tuple[Version, Version]:
    return learned(world.backbone, tmp_path_factory.mktemp("document"))


def test_asked_with_and_without_it_and_replaced_by_the_next_version(
    client: openai.OpenAI, bundles: Bundles, world: World, versions: tuple[Version, Version]
) -> None:
    """By name it answers as the reference, in both versions; other requests are the untouched model's, to the bit."""
    (old, path), (new, newer) = versions
    for prompt in (ABOUT, ELSE):
        ask(client, "base", prompt)  # from here on all have the same prefix cache
    before = [tokens_and_logprobs(ask(client, "base", prompt)) for prompt in (ABOUT, ELSE)]
    with bundles.loaded(NAME, path):
        for bundle in (old, new):
            response = ask(client, NAME, ABOUT, extra_body=TRACED)
            assert trace_of(response)["gate"]["task"] == NAME
            assert [entry["id"] for entry in trace_of(response)["entries"]] == [f"document/{NAME}"]
            assert bundles.server.digest(NAME) == bundle.digest
            assert deviation(world, response, ABOUT, bundle) <= TOLERANCE < deviation(world, response, ABOUT, None)
            assert not trace_of(ask(client, NAME, ELSE, extra_body=TRACED))["gate"]["open"]
            assert tokens_and_logprobs(ask(client, NAME, ELSE)) == before[1]
            assert [tokens_and_logprobs(ask(client, "base", prompt)) for prompt in (ABOUT, ELSE)] == before
            assert bundles.load(NAME, newer, replace=True).status_code == 200
        bundles.wait_until_drained()


def test_facts_stand_beside_it(
    client: openai.OpenAI, bundles: Bundles, world: World, versions: tuple[Version, Version]
) -> None:
    """What is asked in a fact's words gets it as it is stored, and what else is about the document its memory."""
    question, answer = FACT
    bundle, path = versions[0]
    with bundles.loaded(NAME, path):
        bundles.server.teach(NAME, [{"messages": Prompt(None, question).messages, "answer": answer}])
        said = client.chat.completions.create(model=NAME, messages=Prompt(None, question).messages, max_tokens=8)  # type: ignore[arg-type]
        assert said.choices[0].message.content == answer
        assert deviation(world, ask(client, NAME, ABOUT), ABOUT, bundle) <= TOLERANCE


@pytest.mark.slow  # a server of its own, which is started twice
def test_a_restart_serves_the_version_that_was_loaded_last(world: World, admin_key: None, tmp_path: Path) -> None:
    (_, path), (new, newer) = learned(world.backbone, tmp_path)
    kept = ["--memory-root", str(tmp_path), "--memory-state", str(tmp_path / "state")]
    arguments = [str(world.model), *FLAGS, "--served-model-name", "base", *kept]
    found = []
    for start in range(2):
        with (
            serving(arguments, tmp_path / f"log-{start}", {**ENVIRONMENT, **FEWER_PROCESSES, **EAGER}) as url,
            openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=300) as client,
        ):
            if start == 0:
                for each in (path, newer):
                    assert Bundles(url).load(NAME, each, replace=True).status_code == 200
            assert Bundles(url).server.digest(NAME) == new.digest
            found.append(tokens_and_logprobs(ask(client, NAME, ABOUT)))
    assert found[0] == found[1]


@pytest.mark.slow
def test_two_tensor_parallel_ranks(world: World, tmp_path: Path) -> None:
    """Open and closed."""
    (bundle, path), _ = learned(world.backbone, tmp_path)
    environment = {**FEWER_PROCESSES, **EAGER, "VLLM_CPU_OMP_THREADS_BIND": "0|1"}
    with parity.engine(world.model, environment=environment, tensor_parallel_size=2, enforce_eager=True) as llm:
        offline = MemoryLLM(llm)
        memory = offline.load_bundle(path)
        answers = offline.chat([prompt.messages for prompt in (ABOUT, ELSE)], parity.greedy(), memory=memory)
    for prompt, answer, acts in zip((ABOUT, ELSE), answers, (bundle, None), strict=True):
        (completion,) = answer.output.outputs
        assert parity.deviation(world, prompt, completion, acts) <= TOLERANCE
