"""A document becomes a bundle that does better on questions about it than none, interrupted or not."""

from __future__ import annotations

import math
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import kl_div
from transformers import AutoModelForCausalLM

import selector
from inducekv_vllm.bundle import FactRecord, read_bundle, write_bundle
from inducekv_vllm.errors import BundleError, ConfigError, TaskDataError
from selector.api import read
from selector.backbone.generation import answer_logprobs, score
from selector.backbone.injection import TensorMemory
from selector.backbone.model import Backbone
from selector.backbone.scoring import Scorer
from selector.cli.select import main
from selector.document.language import nats_per_byte, warn_of_strange_language
from selector.document.start import initial_memory
from selector.document.study import Studied
from selector.document.teacher import Lesson, logprobs_beside
from selector.document.update import divided
from selector.runtime.checkpoint import Checkpoint
from tests.tiny_models import save_tiny_llama

TEXT = "\n\n".join(
    f"The {name} valve of the plant opens at {bar} bar. It is checked every {days} days by the {team} team."
    for name, bar, days, team in (
        ("kestrel", 37, 12, "north"),
        ("plover", 52, 30, "south"),
        ("dunlin", 18, 45, "harbour"),
        ("avocet", 64, 90, "mill"),
    )
)
FEW: dict[str, Any] = {"steps": 12, "asked": 1, "clozes": 2, "continuations": 2, "answer_tokens": 4}
FEW |= {"learning_rate": 0.1, "precision": "float32", "chunk_tokens": 64, "form": "merged", "start": "first"}
FEW |= {"payload_tokens": 8}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("model") / "llama")


@pytest.fixture(scope="module")
def llama(folder: Path) -> Backbone:
    return Backbone.load(folder)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("document") / "valves.md"
    path.write_text(TEXT)
    return path


@pytest.fixture(scope="module")
def taught(llama: Backbone, file: Path) -> selector.Taught:
    return selector.teach_document(llama, file, **FEW)


def test_memory_of_all_tokens_is_the_document_before_the_request(folder: Path, llama: Backbone) -> None:
    """Merged, untrained, as many tokens as the document: transformers' log-probabilities behind the text."""
    ids = torch.tensor(llama.tokenizer("The kestrel valve opens at 37 bar.", add_special_tokens=False)["input_ids"])
    prompt = llama.encode([{"role": "user", "content": [{"type": "text", "text": "When?"}]}], [])
    answer = [5, 9, 13]
    memory = initial_memory(llama, ids, len(ids), "merged", "first")
    terms = memory.terms(memory.retrieval_keys)
    (ours,) = score(llama, [prompt], [answer], memory, terms)
    whole = torch.cat([ids, prompt["input_ids"][0], torch.tensor(answer)])
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    logprobs = plain(input_ids=whole[None]).logits[0].log_softmax(-1)
    theirs = [logprobs[len(whole) - 4 + at, token] for at, token in enumerate(answer)]
    torch.testing.assert_close(ours, torch.stack(theirs).float(), rtol=0, atol=1e-4)


def test_the_loss_is_the_divergence_from_the_teacher() -> None:
    """With all tokens kept, torch's own; with fewer, the rest counts as one outcome and the loss is no larger."""
    teacher, student = torch.randn(2, 5, 40, generator=torch.manual_seed(0)).log_softmax(-1)
    whole = kl_div(student.double(), teacher.double(), reduction="sum", log_target=True)
    torch.testing.assert_close(Lesson.of(teacher, 40).divergence(student).double(), whole, rtol=1e-4, atol=1e-4)
    few = Lesson.of(teacher, 8)
    assert 0 < float(few.divergence(student)) <= float(whole)
    torch.testing.assert_close(few.divergence(teacher), torch.tensor(0.0), rtol=0, atol=1e-5)


def test_questions_beside_one_piece_are_answered_as_each_alone(llama: Backbone) -> None:
    """What their prompts begin with is computed once: the log-probabilities of whole prompts."""
    texts = (
        ("Which valve opens at 37 bar?", "the kestrel"),
        ("Who?", "north"),
        ("How many days between checks?", "12"),
    )
    rows = [{"prompt": f"{TEXT[:200]}\n\n{asked}", "answer": answer} for asked, answer in texts]
    examples, scorer = read(rows, "valves"), Scorer(llama, batch_size=2)
    for example, found in zip(examples, logprobs_beside(scorer, examples), strict=True):
        (alone,) = answer_logprobs(llama, [scorer.prefix(example)], [scorer.answer_tokens(example)])
        torch.testing.assert_close(found, alone, rtol=0, atol=1e-4)


def test_what_was_taught_is_nearer_to_the_teacher(taught: selector.Taught) -> None:
    found = taught.report["document"]["divergence"]
    assert found["with_memory"] < found["no_memory"]
    metadata = taught.bundle.metadata
    assert [entry.id for entry in metadata.entries] == ["document/valves"]
    assert metadata.gate_tasks == ("valves",)
    assert (metadata.form, metadata.payload_tokens, metadata.recipe) == ("merged", 8, "document")


def test_it_resumes_to_the_same_memory(
    llama: Backbone,
    file: Path,
    taught: selector.Taught,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Killed after the study, which is kept on disk: the tensors of an uninterrupted run, to the bit."""
    output = tmp_path / "valves.safetensors"
    write: Callable[..., None] = Checkpoint.write

    def killed(self: Checkpoint, name: str, *rest: Any) -> None:
        if name.startswith("refinement"):
            raise KeyboardInterrupt
        write(self, name, *rest)

    monkeypatch.setattr(Checkpoint, "write", killed)
    with pytest.raises(KeyboardInterrupt):
        selector.teach_document(llama, file, output=output, progress=True, **FEW)
    progress = capsys.readouterr().err
    assert all(f"{title}: 1 of " in progress for title in ("Asking", "Answering", "Reading the gate's questions"))
    monkeypatch.setattr(Checkpoint, "write", write)
    monkeypatch.setattr("selector.document.study._study", None)  # nothing is studied again
    selector.teach_document(llama, file, output=output, **FEW)
    ours, theirs = read_bundle(output).tensors(), taught.bundle.tensors()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".json", ".safetensors"]


def test_a_new_version_starts_from_the_old_memory(llama: Backbone, taught: selector.Taught) -> None:
    """Without a step it is the old memory; another document's is refused."""
    few = {name: value for name, value in FEW.items() if name not in ("payload_tokens", "steps")}
    document = selector.Document("valves", TEXT.replace("37", "38"))
    again = selector.teach_document(llama, document, previous=taught, steps=0, facts="off", **few)
    for name in ("payload_keys", "payload_values"):
        assert torch.equal(again.bundle.tensors()[name], taught.bundle.tensors()[name])
    assert again.bundle.metadata.parent_digest == taught.bundle.digest
    with pytest.raises(BundleError, match="no memory of the document 'pumps'"):
        selector.teach_document(llama, selector.Document("pumps", TEXT), previous=taught, **few)
    with pytest.raises(ConfigError, match="has 8 tokens, found payload_tokens 4"):
        selector.teach_document(llama, document, previous=taught, payload_tokens=4, **few)
    with pytest.raises(ConfigError, match="has the form 'merged', found 'decoupled'"):
        selector.teach_document(llama, document, previous=taught, **(few | {"form": "decoupled"}))


def test_a_new_version_has_dates_of_its_own(
    folder: Path, file: Path, taught: selector.Taught, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its entry has the id of the old one. Facts that people have taught stay, those of the study do not."""
    old, new = (tmp_path / f"{name}.safetensors" for name in ("old", "new"))
    facts = [
        FactRecord(id=id, task="valves", source_digest=id, question=f"What is {id}?", answer="it")
        for id in ("mine", "fact/valves/cloze/0/1")
    ]
    write_bundle(taught.bundle.next(facts=tuple(facts)), old)
    few = ("--steps", "0", "--facts", "off")
    dates = ("--created", "2026-01-31", "--expires", "90d")
    command = ["--document", str(file), "--model", str(folder), "--output", str(new), "--previous", str(old), *few]
    assert main([*command, "--dry-run"]) == 0
    assert "memory: 8 tokens, " in capsys.readouterr().out
    assert main([*command, *dates, "--allow-worse"]) == 0
    (entry,) = read_bundle(new).metadata.entries
    assert entry.created_at == datetime(2026, 1, 31, tzinfo=UTC)
    assert entry.expires_at == datetime(2026, 5, 1, tzinfo=UTC)
    assert read_bundle(new).metadata.facts == (facts[0],)


def test_a_task_cannot_continue_a_document(
    taught: selector.Taught, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old, table = tmp_path / "old.safetensors", tmp_path / "task.csv"
    write_bundle(taught.bundle, old)
    table.write_text("question,answer\nWho?,I\nWhen?,now\n")
    files = ["--task", str(table), "--previous", str(old), "--output", str(tmp_path / "new.safetensors")]
    for recipe in ("refined", "paper"):
        more = () if recipe == "refined" else ("--recipe", recipe)
        assert main(["--model", "none", *files, *more]) == 2
        assert f"recipe 'document', which the recipe {recipe!r} cannot continue" in capsys.readouterr().err


def test_decoupled_memory_changes_nothing_before_it_is_trained(llama: Backbone, file: Path) -> None:
    untrained = selector.teach_document(
        llama, file, **(FEW | {"form": "decoupled", "start": "pooled", "steps": 0, "facts": "off"})
    )
    found = untrained.report["document"]["divergence"]
    assert found["with_memory"] == pytest.approx(found["no_memory"], abs=1e-5)
    assert bool(TensorMemory.from_bundle(untrained.bundle).payload_keys.any())


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        (["--task", "a.csv"], "expected either --task or --document"),
        (["--recipe", "paper"], "--recipe is for the recipe 'refined' and 'paper'"),
        (["--entries-per-task", "2"], "--entries-per-task is for the recipe 'refined'"),
        (["--anchors-per-task", "2"], "--anchors-per-task is for the recipe 'refined' and 'paper'"),
        (["--columns", "prompt=a"], "--columns is for the recipe 'refined' and 'paper'"),
    ],
)
def test_options_of_tasks_are_refused(
    file: Path, more: list[str], problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out.safetensors"
    assert main(["--document", str(file), "--model", "none", "--output", str(output), *more]) == 2
    more_of_it = "" if "--task" in more else ", and this run's is 'document'"
    assert capsys.readouterr().err.splitlines()[-1] == f"inducekv-select: error: {problem}{more_of_it}"
    assert not list(tmp_path.iterdir())


def test_a_document_that_is_no_document_is_refused(llama: Backbone) -> None:
    with pytest.raises(TaskDataError, match="tokens, expected 128 at least: put it into the prompt, or teach it"):
        selector.teach_document(llama, selector.Document("one", "Tea is served at four."), **FEW)
    with pytest.raises(ConfigError, match="tokens, found payload_tokens 9999"):
        selector.teach_document(llama, selector.Document("valves", TEXT), **(FEW | {"payload_tokens": 9999}))
    with pytest.raises(TaskDataError, match="the document's name must be Unicode"):
        selector.Document("caf\udce9", TEXT)


def test_a_language_that_the_model_reads_badly_is_warned_of(llama: Backbone) -> None:
    """A model of random numbers speaks none: nats a byte are transformers' own loss."""
    ids = llama.tokenizer(TEXT, add_special_tokens=False, return_tensors="pt")["input_ids"][:, :256]
    loss = llama.model(input_ids=ids, labels=ids).loss.double() * (ids.shape[1] - 1)
    expected = float(loss) / len(llama.tokenizer.decode(ids[0, 1:]).encode())
    assert nats_per_byte(llama, ids[0]) == pytest.approx(expected, abs=1e-4)
    with pytest.warns(selector.TaskDataWarning, match="valves: the model reads this document badly"):
        warn_of_strange_language(llama, ids[0], "valves")


@pytest.mark.parametrize("number", [60, 700])
def test_validation_has_questions_of_every_kind(number: int) -> None:
    kinds: list[Any] = ["question", "use", "summary", "cloze", "continuation"]
    lesson = Lesson(torch.zeros(1, 1), torch.zeros(1, 1))
    rows = read([{"prompt": f"{at}?", "answer": "yes"} for at in range(number)], "valves")
    studied = [Studied(each, lesson, kinds[at % 5], "", False, True) for at, each in enumerate(rows)]
    training, validation = divided(studied, 0)
    assert {each.kind for each in validation} == {*kinds}
    assert len(validation) == min(64, math.ceil(number / 8))
    assert len(training) == number - len(validation)
