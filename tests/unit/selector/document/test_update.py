"""Documents become entries behind one gate, and what cannot become one is refused in one line."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import torch

import selector
from inducekv_vllm.bundle import FactRecord, read_bundle, write_bundle
from inducekv_vllm.errors import BundleError, ConfigError, TaskDataError, UnsupportedModel
from selector.backbone.model import Backbone
from selector.cli.select import main
from tests.gates import small_fits
from tests.tiny_hybrids import save_qwen3_5

TEXT = "\n\n".join(
    f"The {name} valve of the plant opens at {bar} bar. It is checked every {days} days by the {team} team."
    for name, bar, days, team in (
        ("kestrel", 37, 12, "north"),
        ("plover", 52, 30, "south"),
        ("dunlin", 18, 45, "harbour"),
        ("avocet", 64, 90, "mill"),
    )
)
PUMPS = TEXT.replace("valve", "pump").replace("opens", "stops").replace("checked", "oiled")
FEW: dict[str, Any] = {"asked": 1, "precision": "float32"}
VALVES = selector.Document("valves", TEXT)


def teach(llama: Backbone, *documents: selector.Document, **more: Any) -> selector.Taught:
    with small_fits():
        return selector.teach_document(llama, documents, **{**FEW, **more})


@pytest.fixture(scope="module")
def taught(llama: Backbone) -> selector.Taught:
    return teach(llama, VALVES, payload_tokens=32)


def test_a_document_is_an_entry_and_a_task_of_the_gate(taught: selector.Taught) -> None:
    metadata, found = taught.bundle.metadata, taught.report["documents"]["valves"]
    assert [entry.id for entry in metadata.entries] == ["document/valves"]
    assert metadata.gate_tasks == ("valves",)
    assert (metadata.form, metadata.weighting, metadata.recipe) == ("merged", "uniform", "document")
    assert metadata.payload_tokens == found["kept"] == 32 < found["tokens"]
    assert 0 < found["lost"]["attention"] < 1
    assert metadata.settings["documents"]["valves"] == found


def test_the_same_document_gives_the_same_tensors(llama: Backbone, taught: selector.Taught) -> None:
    again = teach(llama, VALVES, payload_tokens=32).bundle.tensors()
    assert all(torch.equal(again[name], tensor) for name, tensor in taught.bundle.tensors().items())


def test_all_tokens_lose_nothing_and_fewer_lose_more(llama: Backbone, taught: selector.Taught) -> None:
    lost = {share: teach(llama, VALVES, share=share).report["documents"]["valves"]["lost"] for share in (1, 16)}
    assert lost[1] == pytest.approx({"attention": 0, "log_probability": 0}, abs=1e-4)
    assert lost[1]["attention"] < taught.report["documents"]["valves"]["lost"]["attention"] < lost[16]["attention"]


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_steps_from_there_say_more_of_the_text(llama: Backbone, precision: str) -> None:
    """What attention loses is said of the compaction."""
    taught = teach(llama, VALVES, payload_tokens=32, precision=precision)
    found = teach(llama, VALVES, payload_tokens=32, precision=precision, steps=8)
    before, after = (each.report["documents"]["valves"] for each in (taught, found))
    assert after["nats_of_a_token"]["kept"] < before["nats_of_a_token"]["kept"] - 0.1
    assert after["lost"]["attention"] == before["lost"]["attention"]
    assert not torch.equal(found.bundle.payload_keys, taught.bundle.payload_keys)
    assert found.bundle.payload_keys.shape == taught.bundle.payload_keys.shape


class Steps(selector.Callback):
    def __init__(self, killed_at: int | None = None) -> None:
        self.killed_at, self.taken = killed_at, list[int]()

    def on_step(self, training: str, step: int, loss: float) -> None:
        self.taken.append(step)
        if step == self.killed_at:
            raise KeyboardInterrupt


def test_steps_go_on_where_a_killed_run_stopped(
    llama: Backbone, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next version of the document takes as many."""
    monkeypatch.setattr("selector.refined.training.STEPS_BETWEEN_CHECKS", 2)
    options: dict[str, Any] = {"payload_tokens": 32, "steps": 4, "output": tmp_path / "valves.safetensors"}
    with pytest.raises(KeyboardInterrupt):
        teach(llama, VALVES, **options, callbacks=[Steps(killed_at=3)])
    steps = Steps()
    resumed = teach(llama, VALVES, **options, callbacks=[steps])
    assert steps.taken == [3, 4]
    after = Steps()
    options = {"previous": resumed, "callbacks": [after]}
    anew = teach(llama, VALVES, **options).bundle
    assert after.taken == [1, 2, 3, 4]
    assert torch.equal(anew.payload_keys, resumed.bundle.payload_keys)


def test_two_documents_in_one_bundle_and_their_next_version(llama: Backbone, taught: selector.Taught) -> None:
    """The memory's size is taken over; a document that is left out is named; facts of people stay."""
    fact = FactRecord(id="mine", task="valves", source_digest="mine", question="What is mine?", answer="it")
    first = taught.bundle.next(facts=(fact,))
    both = teach(llama, VALVES, selector.Document("pumps", PUMPS), previous=first).bundle
    assert [entry.task for entry in both.metadata.entries] == ["valves", "pumps"]
    assert both.metadata.gate_tasks == ("valves", "pumps")
    assert both.payload_tokens == 32
    assert both.metadata.facts == (fact,)
    assert both.metadata.parent_digest == first.digest
    assert torch.equal(both.payload_keys[:, :1], first.payload_keys)
    with pytest.raises(BundleError, match="has the entry 'document/pumps', expected documents that are given again"):
        teach(llama, VALVES, previous=both)


def test_a_folder_of_documents(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each has its own date of expiry; the dry run says what each size loses, and writes nothing."""
    manuals, output = tmp_path / "manuals", tmp_path / "out" / "manuals.safetensors"
    manuals.mkdir()
    (manuals / "valves.md").write_text(TEXT)
    (manuals / "pumps.txt").write_text(PUMPS)
    (manuals / ".hidden").write_bytes(b"\xff")
    command = ["--document", str(manuals), "--model", str(folder), "--output", str(output), "--share", "8"]
    assert main([*command, "--dry-run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    tokens = int(next(line for line in lines if line.startswith("valves")).split(" of ")[1].split()[0])
    for share in (2, 4, 8, 16):
        (line,) = (each for each in lines if each.startswith(f"valves, {tokens // share} of {tokens} tokens: "))
        assert " MB; loses " in line
    assert not output.exists()
    with small_fits():
        assert main([*command, "--created", "2026-01-31", "--expires", "90d", "--allow-worse"]) == 0
    entries = read_bundle(output).metadata.entries
    assert [entry.task for entry in entries] == ["pumps", "valves"]
    assert {entry.expires_at for entry in entries} == {datetime(2026, 5, 1, tzinfo=UTC)}


def test_a_text_beyond_the_context_is_read_in_parts(llama: Backbone) -> None:
    """Each part at its own positions; what is kept is as large as for one reading."""
    context = llama.model.config.max_position_embeddings
    rows = (
        f"The valve number {row} opens at {row % 89 + 3} bar and closes at {row % 31} bar." for row in range(context)
    )
    text = " ".join(rows)[: 6 * context]
    found = teach(llama, selector.Document("rows", text), payload_tokens=32).report["documents"]["rows"]
    assert found["tokens"] > context
    assert found["kept"] == 32


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (
            "Tea is served at four.",
            "has .* tokens, expected 128 at least: put it into the prompt, or teach it as facts",
        ),
        ("tea " * 10_000, "nothing can be asked about the document 'it': it has no sentences of six words"),
    ],
)
def test_a_text_that_is_no_document_is_refused(llama: Backbone, text: str, problem: str) -> None:
    with pytest.raises(TaskDataError, match=problem):
        teach(llama, selector.Document("it", text))


@pytest.mark.parametrize(
    "text",
    [
        "\n".join(" ".join(str(17 * row * column % 997) for column in range(20)) for row in range(1, 21)),
        "The mill stands by the river and grinds at night.\n\nDie Mühle steht am Fluss und mahlt bei Nacht.\n\n"
        "Мельница стоит у реки и мелет по ночам до самого утра.\n\n" * 3,
    ],
    ids=["400 numbers", "three languages"],
)
def test_tables_and_languages_are_texts_like_others(llama: Backbone, text: str) -> None:
    found = teach(llama, selector.Document("it", text))
    assert found.bundle.payload_values.isfinite().all()


def test_sizes_that_cannot_be_are_refused(llama: Backbone) -> None:
    with pytest.raises(ConfigError, match=r"a share of 99999 leaves none of the .* tokens of 'valves'"):
        teach(llama, VALVES, share=99_999)
    with pytest.raises(ConfigError, match=r"'valves' has .* tokens, expected the 9999 of the memory at least"):
        teach(llama, VALVES, payload_tokens=9999)
    with pytest.raises(TaskDataError, match="two documents have the name 'valves', which is a task of the gate"):
        teach(llama, VALVES, VALVES)
    with pytest.raises(TaskDataError, match="the document's name must be Unicode"):
        selector.Document("caf\udce9", TEXT)


def test_a_model_without_full_attention_is_refused_before_it_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = save_qwen3_5(tmp_path / "hybrid")
    monkeypatch.setattr(Backbone, "load", None)
    with pytest.raises(UnsupportedModel, match="a document's memory needs full attention in every layer, found it in"):
        selector.teach_document(model, VALVES)


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


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        (["--task", "a.csv"], "expected either --task or --document"),
        (["--recipe", "paper"], "--recipe is for the recipe 'refined' and 'paper', and this run's is 'document'"),
        (["--map-rank", "5"], "--map-rank is for the recipe 'refined', and this run's is 'document'"),
        (["--columns", "prompt=a"], "--columns is for the recipe 'refined' and 'paper', and this run's is 'document'"),
    ],
)
def test_options_of_tasks_are_refused(
    more: list[str], problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, output = tmp_path / "valves.md", tmp_path / "out.safetensors"
    file.write_text(TEXT)
    assert main(["--document", str(file), "--model", "none", "--output", str(output), *more]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == f"inducekv-select: error: {problem}"
    assert not output.exists()
