"""Facts in real engines: what is generated and its log-probabilities, against transformers and the formula."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm.exceptions import GenerationError
from vllm.sampling_params import StructuredOutputsParams

from inducekv_vllm.backbone.fact_reader import AskedQuestion
from inducekv_vllm.backbone.stored_facts import StoredAnswers
from inducekv_vllm.bundle import FactRecord, read_bundle, write_bundle
from inducekv_vllm.errors import BundleError, UnknownFact
from inducekv_vllm.facts import AskedFacts
from inducekv_vllm.frontend.offline import MemoryAnswer
from selector.update.forget import without_entries
from tests.engine.facts import OPTIONS, Facts
from tests.engine.parity import (
    FEWER_PROCESSES,
    WORKER_VARIABLE,
    MemoryEngine,
    Prompt,
    World,
    engine,
    gated_bundle,
    greedy,
    make_world,
    silent_below,
    text_prompts,
)
from tests.tiny_families import FAMILIES

CITIES = ("Lima", "Oslo", "Quito", "Cairo", "Seoul", "Paris", "Delhi", "Tunis", "Hanoi", "Perth")


def fact(city: str, task: str = "codes", answer: str | None = None, **changes: Any) -> FactRecord:
    question = f"What is the code of {city}?"
    record = {"id": f"{task}/{city}", "task": task, "source_digest": "0", "question": question}
    return FactRecord(**{**record, "answer": answer or f"{city[::-1]} {len(city)}", **changes})


def asked(city: str) -> Prompt:
    """In other letters, and politely."""
    return Prompt(None, f"please tell me what the code of {city.lower()} is")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    folder = tmp_path_factory.mktemp("world")
    return make_world(FAMILIES["llama"](folder / "model"), folder, make_prompts=text_prompts)


@pytest.fixture(scope="module")
def facts(world: World, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Facts]:
    with engine(world.model, environment=FEWER_PROCESSES, **OPTIONS) as llm:
        yield Facts(MemoryEngine(world, llm), tmp_path_factory.mktemp("taught"))


def test_facts_alone(facts: Facts) -> None:
    """The known are answered in any wording, the unknown by the model."""
    facts.teach("alone", [fact(city) for city in CITIES])
    questions = [asked(city) for city in CITIES[:3]] + [asked("Milan"), Prompt(None, "How are you?")]
    answers = facts.check("alone", questions)
    assert [facts.found("alone", each) for each in answers] == [[f"codes/{city}"] for city in CITIES[:3]] + [[], []]
    for city, answer in zip(CITIES[:3], answers, strict=False):
        stored = facts.reader.answer(f"{city[::-1]} {len(city)}")
        assert tuple(answer.output.outputs[0].token_ids[: len(stored)]) == stored


@pytest.mark.skipif(WORKER_VARIABLE not in os.environ, reason="vLLM's V1 runner calls processors in every step")
def test_answers_alone_process_logits(facts: Facts) -> None:
    """A step whose requests have no answer is the untouched model's."""
    llm = facts.served.offline.llm
    facts.teach("alone", [fact(city, id=f"p/{city}") for city in CITIES])
    for question, is_found in ((asked("Milan"), False), (asked("Oslo"), True)):
        before = llm.collective_rpc("inducekv_calls")[0]["processed"]
        (answer,) = facts.check("alone", [question])
        assert answer.decision is not None
        assert (answer.decision.fact is not None) == is_found
        assert (llm.collective_rpc("inducekv_calls")[0]["processed"] > before) == is_found


def test_a_fact_is_forgotten(facts: Facts, tmp_path: Path) -> None:
    served = facts.served
    facts.teach("all", [fact(city) for city in CITIES])
    first = f"codes/{CITIES[0]}"
    served.memories["fewer"], report = served.offline.forget([first], tmp_path / "f", served.memories["all"])
    assert (report.ids, report.facts) == ((first,), len(CITIES) - 1)
    served.bundles["fewer"] = read_bundle(tmp_path / "f")
    answers = facts.check("fewer", [asked(CITIES[0]), asked(CITIES[1])])
    assert [facts.found("fewer", each) for each in answers] == [[], [f"codes/{CITIES[1]}"]]
    with pytest.raises(UnknownFact, match="no fact 'nothing'"):
        served.offline.forget(["nothing"], tmp_path / "g", served.memories["all"])
    assert not (tmp_path / "g").exists()


def test_a_memory_is_taught_further_as_it_is_or_not_at_all(facts: Facts, tmp_path: Path) -> None:
    """A file that another writer has replaced is not built on, nor is a path that nobody knows any more."""
    served, path, next_one = facts.served.offline, tmp_path / "a.safetensors", tmp_path / "next.safetensors"
    lima, report = served.teach([fact("Lima")], path)
    assert (report.ids, report.facts, report.dropped, report.replaced) == (("codes/Lima",), 1, (), ())
    copy = tmp_path / "copy.safetensors"
    copy.write_bytes(path.read_bytes())
    served.teach([fact("Quito")], path)  # another writer
    for change in (
        lambda: served.teach([fact("Oslo")], next_one, lima),
        lambda: served.forget(["codes/Lima"], next_one, lima),
    ):
        with pytest.raises(BundleError, match=f"the file has changed: expected digest {lima.digest}, found"):
            change()
    assert not next_one.exists()
    assert served.load_bundle(copy).digest == lima.digest
    served.teach([fact("Oslo")], next_one, lima)
    assert [each.id for each in read_bundle(next_one).metadata.facts] == ["codes/Lima", "codes/Oslo"]


def test_it_ends_with_the_answer(facts: Facts) -> None:
    """Whatever the sampling, a long answer, too."""
    long = " ".join(f"{city} {number}" for number, city in enumerate(CITIES))
    facts.teach("ends", [*[fact(city) for city in CITIES], fact("Bonn", answer=long)])
    for city, said in (("Oslo", "olsO 4"), ("Bonn", long)):
        for changes in ({}, {"temperature": 1.0, "n": 3}, {"temperature": 1.5, "top_p": 0.5, "presence_penalty": 2.0}):
            params = greedy(ignore_eos=False, seed=3, **changes, max_tokens=100)
            (answer,) = facts.served.chat([asked(city)], ["ends"], params)
            assert [each.text for each in answer.output.outputs] == [said] * params.n


@pytest.mark.skipif(WORKER_VARIABLE in os.environ, reason="vLLM's kernel for grammars does not run in the interpreter")
def test_what_a_grammar_rules_out_stays_so(facts: Facts) -> None:
    facts.teach("grammar", [fact(city) for city in CITIES])
    only = StructuredOutputsParams(choice=["yes", "no"])
    (answer,) = facts.served.chat([asked("Oslo")], ["grammar"], greedy(structured_outputs=only, ignore_eos=False))
    assert answer.output.outputs[0].text in ("yes", "no")
    assert withheld(answer) == "the request asks for structured output"


def withheld(answer: MemoryAnswer) -> str | None:
    assert answer.decision is not None
    assert answer.decision.fact is not None
    return answer.decision.fact.withheld


def test_behind_a_gate(facts: Facts) -> None:
    """Facts of the gate's task count where it opens for it, and where it is closed but not by much.

    Those of a task that it does not have count everywhere.
    """
    world = facts.served.world
    own = [Prompt(None, f"What is the code of {city}?") for city in ("Lima", "Oslo")]
    again = [Prompt(None, f"What is the code of {city}, please?") for city in ("Lima", "Oslo")]
    questions = [*text_prompts(4, 18), *own, asked("Quito"), *again]
    tasks = ["a", None, "b", "a", "a", "b", None, None, None]
    stored = [fact(city, task=task) for city, task in zip(CITIES, ["a", "b", "c"] * 4, strict=False)]
    more = [fact(city, task="c", id=f"more/{city}") for city in CITIES[3:]]
    for last_layer, changes in ((None, silent_below(world, 0, 0)), (1, silent_below(world, 1, 0))):
        near = (-0.6, -0.4)  # where it is closed, every margin is -0.5
        bundle = gated_bundle(world, questions, tasks, last_layer, near, **changes)
        made = facts.teach("gated", stored + more, bundle)
        assert set(made.metadata.fact_tasks) == {"a", "b", "c"}
        for _ in range(2):
            answers = facts.check("gated", questions)
            assert [each.decision and each.decision.task for each in answers] == tasks
        found = [facts.found("gated", each) for each in answers]
        assert found == [[], [], [], [], ["a/Lima"], ["b/Oslo"], ["c/Quito"], ["a/Lima"], []]


def test_a_task_of_facts_alone_behind_a_gate(facts: Facts) -> None:
    """The gate opens for it, and what asks for no fact is answered by the untouched model."""
    world, path = facts.served.world, facts.folder / "alone.safetensors"
    own = [Prompt(None, f"What is the code of {city}?") for city in ("Lima", "Oslo")]
    questions, tasks = [*text_prompts(3, 18), *own], ["a", None, "b", "a", "b"]
    stored = [fact(city, task=task) for city, task in zip(CITIES, ["a", "b"] * 5, strict=True)]
    for last_layer, changes in ((None, silent_below(world, 0, 0)), (1, silent_below(world, 1, 0))):
        bundle = gated_bundle(world, questions, tasks, last_layer, **changes)
        of_b = [row for row, entry in enumerate(bundle.metadata.entries) if entry.task == "b"]
        assert bundle.gate is not None
        alone = facts.teach("a", stored, without_entries(bundle, of_b)).with_gate(bundle.gate, {})
        assert (alone.metadata.tasks, alone.metadata.gate_tasks) == (("a",), ("a", "b"))
        write_bundle(alone, path)
        facts.served.bundles["alone"], facts.served.memories["alone"] = alone, facts.served.offline.load_bundle(path)
        answers = facts.check("alone", questions)
        assert [each.decision and each.decision.task for each in answers] == tasks
        assert [facts.found("alone", each) for each in answers] == [[], [], [], ["a/Lima"], ["b/Oslo"]]
        injected = [each.decision is not None and each.decision.injection is not None for each in answers]
        assert injected == [True, False, False, True, False]


@pytest.mark.skipif(WORKER_VARIABLE in os.environ, reason="the worker is another process")
def test_a_search_that_raises_ends_its_own_request(facts: Facts, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the forward pass, in it, and after it; and the engine goes on."""
    world, questions = facts.served.world, [asked("Lima"), asked("Oslo")]
    facts.teach("raises", [fact(city, id=f"r/{city}") for city in CITIES])
    for name, last_layer in (("raises in the pass", 1), ("raises after it", None)):
        bundle = gated_bundle(world, questions, ["a", "a"], last_layer, **silent_below(world, 1, 0))
        facts.teach(name, [fact(city, task="c") for city in CITIES], bundle)
    find = StoredAnswers.find

    def raise_for_lima(self: StoredAnswers, asked: AskedFacts, asks: AskedQuestion, *more: Any) -> Any:
        if "lima" in asks.text.lower():
            raise KeyError("lima")
        return find(self, asked, asks, *more)

    names = ["raises", "raises in the pass", "raises after it"]
    with monkeypatch.context() as patch:
        patch.setattr(StoredAnswers, "find", raise_for_lima)
        for name in names:
            with pytest.raises(GenerationError, match=r"prompt 1: .* \(KeyError\)"):
                facts.served.chat(questions[::-1], [name] * 2, greedy())
            (answered,) = facts.served.chat(questions[1:], [name], greedy())
            assert facts.found(name, answered) == [f"{'r' if name == 'raises' else 'c'}/Oslo"]
    for name in names:
        assert len(facts.found(name, facts.check(name, questions[:1])[0])) == 1


@pytest.mark.slow
def test_two_ranks(world: World, tmp_path: Path) -> None:
    """The first one finds the facts, and the request goes back for them."""
    environment = {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    with engine(world.model, environment=environment, tensor_parallel_size=2, **OPTIONS) as llm:
        facts = Facts(MemoryEngine(world, llm), tmp_path)
        test_facts_alone(facts)
        test_behind_a_gate(facts)
