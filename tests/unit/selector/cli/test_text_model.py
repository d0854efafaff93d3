"""`inducekv-select` and `inducekv-bundle` with a text-only model, and with data that does not fit the model."""

import json
from pathlib import Path

import pytest
import torch

from inducekv_vllm.bundle import Bundle, read_bundle, with_metadata
from inducekv_vllm.teaching import stored_bytes
from selector.backbone.bundled_model import BundledModel
from selector.backbone.gate_rule import fact_tasks
from selector.backbone.model import Backbone
from selector.backbone.scoring import Questions, Scorer
from selector.cli.bundle import main as bundle_command
from selector.data.examples import read_task
from selector.update.facts import with_facts_that_help
from tests.task_data import record
from tests.tiny_families import FAMILIES
from tests.unit.selector.stream import SMALL, Stream

SEARCH = ("--steps", "2", "--batch-size", "4", "--budget", "4", "--learning-rate", "0.1", *SMALL)
TASKS = {"colours": "What colour is the circle?", "counts": "How many squares are there?", "base": "yes or no?"}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return FAMILIES["llama"](tmp_path_factory.mktemp("llama"))


@pytest.fixture
def text_stream(tmp_path: Path, llama: Path) -> Stream:
    """Tasks whose examples have a plain string as content."""
    tasks = {}
    for task, question in TASKS.items():
        lines = [
            record(row, id=f"{task}{row}", task=task, messages=[{"role": "user", "content": f"{question} {row}"}])
            for row in range(12)
        ]
        tasks[task] = tmp_path / f"{task}.jsonl"
        tasks[task].write_text("".join(json.dumps(line) + "\n" for line in lines))
    options = (*SEARCH, "--base", str(tasks["base"]), "--anchors", str(tmp_path / "anchors"))
    return Stream(tmp_path, llama, tasks, options)


def test_a_stream_of_two_tasks(text_stream: Stream) -> None:
    first = text_stream.update("colours")
    second = text_stream.update("counts", previous="colours")
    assert second.metadata.tasks == ("colours", "counts")
    assert second.gate is not None
    assert first.metadata.activations["colours"] in ("text", "generation")
    # "prompt" is "text" here, and is not trained again.
    search = text_stream.report("colours")["activation"]["search"]
    assert [(each["activation"], each["first_layer"] > 0) for each in search] == [
        ("text", False),
        ("generation", False),
        ("generation", True),
    ]


def test_facts_that_cannot_be_are_warned_of(text_stream: Stream, capsys: pytest.CaptureFixture[str]) -> None:
    wordless = record(0, id="x", task="colours", messages=[{"role": "user", "content": "?!"}])
    with text_stream.tasks["colours"].open("a") as file:
        file.write(json.dumps(wordless))
    text_stream.update("colours", "--activation", "generation")
    warning = "the examples are not kept as facts: example 'fact/colours/x': expected a question with words, found '?!'"
    assert f"inducekv-select: warning: {warning}" in capsys.readouterr().err.splitlines()


def test_pictures_are_refused_before_anything_is_trained(text_stream: Stream, tasks: dict[str, Path]) -> None:
    mixed = Stream(text_stream.folder, text_stream.model, tasks, SEARCH)
    before = sorted(text_stream.folder.iterdir())
    error = mixed.refuse("places")
    assert "example 'places" in error
    assert "LlamaForCausalLM is a text-only model, found 1 images in the messages" in error
    assert sorted(text_stream.folder.iterdir()) == before


CITIES = ("Lima", "Oslo", "Quito", "Cairo", "Seoul", "Paris", "Delhi", "Tunis", "Hanoi", "Perth", "Accra", "Minsk")


def codes(path: Path, wording: str) -> Path:
    """Something to remember: the code of each city, asked in one wording."""
    lines = [
        record(
            row, id=city, task="codes", messages=[{"role": "user", "content": wording.format(city)}], answer=city[::2]
        )
        for row, city in enumerate(CITIES)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture
def remembering(text_stream: Stream, tmp_path: Path, llama: Path) -> Stream:
    """With a task whose validation asks for its facts in another wording."""
    training = codes(tmp_path / "codes.jsonl", "What is the code of {}?")
    validation = codes(tmp_path / "asked.jsonl", "What is the code of {}")
    options = (*text_stream.options, "--validation", str(validation))
    return Stream(tmp_path, llama, {**text_stream.tasks, "codes": training}, options)


def test_what_is_to_be_remembered_is_kept_as_facts(
    remembering: Stream, text_stream: Stream, tmp_path: Path, llama: Path
) -> None:
    """They answer beside the memory, where they do not answer everything; the next task's version keeps them."""
    validation = tmp_path / "asked.jsonl"
    other = record(0, id="sum", task="codes", messages=[{"role": "user", "content": "Add 3 and 4!"}], answer="7")
    validation.write_text(validation.read_text() + json.dumps(other) + "\n")
    bundle = remembering.update("codes")
    assert bundle.metadata.tasks == ("codes",)
    assert [fact.id for fact in bundle.metadata.facts] == [f"fact/codes/{city}" for city in CITIES]
    assert {str(fact.created_at) for fact in bundle.metadata.facts} == {"2026-01-31 00:00:00+00:00"}
    facts = remembering.report("codes")["facts"]
    assert facts["facts"] == 12
    assert facts["accuracy"]["memory_and_facts"] > facts["accuracy"]["memory"]
    assert remembering.report("codes")["validation_accuracy"]["deployed"] == facts["accuracy"]["memory_and_facts"]
    model, asked = BundledModel(Scorer(Backbone.load(llama)), bundle), read_task(validation)
    counting = fact_tasks(bundle, model.evidence(asked))
    assert counting.count(("codes",)) >= 12
    for question, text, tasks in zip(asked[:-1], model.answers(asked[:-1], 12), counting, strict=False):
        assert (text == question.answer) == (tasks == ("codes",))

    next_bundle = text_stream.update("colours", previous="codes")
    assert next_bundle.metadata.facts == bundle.metadata.facts
    forgotten(remembering.output("colours"), next_bundle, tmp_path)


def forgotten(path: Path, bundle: Bundle, folder: Path) -> None:
    for forget, named, left in (("--task", "codes", 0), ("--entry", bundle.metadata.facts[0].id, 11)):
        output = folder / "left.safetensors"
        assert bundle_command(["forget", str(path), forget, named, "--output", str(output)]) == 0
        assert len(read_bundle(output).metadata.facts) == left


def test_a_task_is_learned_beside_facts_that_were_taught(
    text_stream: Stream, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the tensors that it has alone, but for the temperature, which weights that are uniform do without."""
    task, output = codes(tmp_path / "codes.jsonl", "What is the code of {}?"), text_stream.output("taught")
    teach = ["teach", f"--model={text_stream.model}", f"--task={task}", f"--output={output}"]
    assert bundle_command(teach) == 0
    quick = ("--activation", "generation", "--facts", "off")
    alone = text_stream.update("colours", *quick)
    assert "Answering with memory: 1 of 1" in capsys.readouterr().err
    beside = text_stream.update("colours", *quick, "--anchors", str(tmp_path / "other"), previous="taught")
    for name, tensor in alone.tensors().items():
        assert name == "temperature" or torch.equal(beside.tensors()[name], tensor), name
    assert beside.metadata.facts == read_bundle(output).metadata.facts
    assert (beside.metadata.recipe, beside.metadata.gate_tasks) == ("refined", ("colours",))


def test_nothing_is_trained_where_facts_answer_everything(
    remembering: Stream, text_stream: Stream, tmp_path: Path, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the first task, and behind others; each has its questions behind the gate."""
    alone = remembering.update("codes")
    assert (alone.num_entries, alone.metadata.gate_tasks, len(alone.metadata.facts)) == (0, ("codes",), 12)
    report = remembering.report("codes")
    assert report["facts"] == {"accuracy": {"facts": 1.0}, "facts": 12, "tried": 12}
    assert report["validation_accuracy"]["deployed"] == 1.0
    assert (report["refinement"]["history"], report["activation"]["chosen"]) == ([], None)

    second = text_stream.update("colours", previous="codes")
    assert (second.metadata.tasks, second.metadata.gate_tasks) == (("colours",), ("codes", "colours"))
    assert second.metadata.facts == alone.metadata.facts
    scorer, asked = Scorer(Backbone.load(llama)), read_task(tmp_path / "asked.jsonl")
    model = BundledModel(scorer, second)
    assert not model.routing(asked)[0].any()  # no entries are read
    assert [text == q.answer for text, q in zip(model.answers(asked, 12), asked, strict=True)].count(True) >= 10
    forgotten(remembering.output("colours"), second, tmp_path)
    assert "already holds the task 'codes'" in remembering.refuse("codes", previous="colours")

    remembering.tasks["cities"] = codes(tmp_path / "cities.jsonl", "Where is the code of {} used?")
    for path in (remembering.tasks["cities"], codes(tmp_path / "asked.jsonl", "Where is the code of {} used")):
        path.write_text(path.read_text().replace('"codes"', '"cities"'))
    third = remembering.update("cities", previous="colours")
    assert third.metadata.gate_tasks == ("codes", "colours", "cities")
    assert torch.equal(third.payload_values, second.payload_values)
    assert third.metadata.parent_digest == second.digest

    # The facts of earlier tasks make no room for those of another one.
    cities, questions = read_task(remembering.tasks["cities"]), Questions(asked, torch.zeros(len(asked), 1))
    used = stored_bytes(second, second.metadata.facts)
    full = with_metadata(second, settings=second.metadata.settings | {"budget_bytes": used + 100})
    kept, tried = with_facts_that_help(full, cities, questions, scorer)
    assert kept is full
    assert f"its budget is {used + 100}" in tried["refused"]
    monkeypatch.setattr("inducekv_vllm.bundle.file.MAX_HEADER_BYTES", 1000)
    kept, tried = with_facts_that_help(second, cities, questions, scorer)
    assert kept is second
    assert "the metadata is too large" in tried["refused"]
