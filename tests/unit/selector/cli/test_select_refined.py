"""`inducekv-select` by its default recipe, the refined one: a stream of tasks, resumption after SIGKILL, refusals.

Most tests are of merged memory, which has more to go wrong: several entries a task and a calibration.
"""

import shutil
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import torch

from inducekv_vllm.bundle import Bundle, write_bundle
from selector.backbone.bundled_model import BundledModel
from selector.backbone.model import Backbone
from selector.backbone.scoring import Scorer
from selector.data.anchors import AnchorStore
from selector.data.examples import read_task
from selector.update.forget import without_entries
from tests.task_data import questions_about, write_task
from tests.unit.selector import small_select
from tests.unit.selector.stream import REFINED, Stream, kill_when


def of_data(stream: Stream, anchors: Path) -> Stream:
    """By the refined recipe, with base questions and anchors."""
    data = ("--base", str(stream.tasks["base"]), "--anchors", str(anchors), "--anchors-per-task", "6")
    return replace(stream, options=(*REFINED, *data))


@pytest.fixture
def stream(stream: Stream, tmp_path: Path) -> Stream:
    return of_data(stream, tmp_path / "anchors")


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory, model_folders: dict[str, Path], tasks: dict[str, Path]) -> Stream:
    """Has learnt "colours"; not to be changed."""
    root = tmp_path_factory.mktemp("first")
    stream = of_data(Stream(root / "out", model_folders["llava"], tasks), root / "anchors")
    stream.update("colours")
    return stream


@pytest.fixture
def learnt(stream: Stream, first: Stream, tmp_path: Path) -> Stream:
    """A copy of it."""
    shutil.copytree(first.folder.parent, tmp_path, dirs_exist_ok=True)
    return stream


def searching(stream: Stream) -> Stream:
    """Of decoupled memory, with a search of activation and learning rate."""
    at = stream.options.index("--learning-rate")
    return replace(stream, options=(*stream.options[2:at], *stream.options[at + 2 :]))


def test_entries_are_dated(stream: Stream) -> None:
    """By the start of their own run, or as given; earlier entries keep their dates."""
    at = stream.options.index("--created")
    undated = replace(stream, options=stream.options[:at] + stream.options[at + 2 :])
    before = datetime.now(UTC).replace(microsecond=0)
    first = undated.update("colours")
    (made,) = {entry.created_at for entry in first.metadata.entries}
    assert made is not None
    assert before <= made <= datetime.now(UTC)
    assert {entry.expires_at for entry in first.metadata.entries} == {None}
    assert undated.report("colours")["digest"] == first.digest

    second = stream.update("counts", "--expires", "30d", previous="colours")
    given = datetime(2026, 1, 31, tzinfo=UTC)
    dates = {(entry.task, entry.created_at, entry.expires_at) for entry in second.metadata.entries}
    assert dates == {("colours", made, None), ("counts", given, given + timedelta(days=30))}
    for date, problem in (("2026-01-30", "is not after 2026-01-31T00:00:00Z"), ("soon", "--expires must be a date")):
        assert problem in stream.refuse("places", "--expires", date, previous="counts")


def payload(bundle: Bundle, task: str) -> list[torch.Tensor]:
    """Retrieval keys, payload keys and payload values of the task's entries, each with the entries' axis first."""
    rows = [row for row, entry in enumerate(bundle.metadata.entries) if entry.task == task]
    payloads = (bundle.payload_keys, bundle.payload_values)
    return [bundle.retrieval_keys[rows], *(tensor[:, rows].transpose(0, 1) for tensor in payloads)]


def test_the_next_task_takes_the_form_and_keeps_old_entries_to_the_bit(learnt: Stream, llava: Backbone) -> None:
    first = learnt.bundle("colours")
    second = replace(learnt, options=learnt.options[4:]).update("counts", previous="colours")  # the form is not given
    second.require_backbone(llava.fingerprint)
    metadata = second.metadata
    assert (metadata.recipe, metadata.form, metadata.weighting) == ("refined", "merged", "prior")
    assert metadata.parent_digest == first.digest
    assert learnt.report("counts")["composition"] == {
        "before": {"colours": 2},
        "after": {"colours": 2, "counts": 2},
    }
    for before, after in zip(payload(first, "colours"), payload(second, "colours"), strict=True):
        assert torch.equal(before, after)
    for calibrated in ("temperature", "value_gates", "layer_bias"):
        assert torch.equal(getattr(first, calibrated), getattr(second, calibrated))
    assert float(first.temperature) != pytest.approx(0.07, rel=1e-3), "the calibration was not trained"


def test_the_defaults_are_decoupled_memory(stream: Stream) -> None:
    default = replace(stream, options=stream.options[4:])
    assert "merged" not in default.options
    metadata = default.update("colours", "--map-rank", "2").metadata
    assert (metadata.form, metadata.weighting, metadata.payload_tokens) == ("decoupled", "uniform", 2)
    assert [entry.task for entry in metadata.entries] == list(metadata.activations) == ["colours"]
    assert metadata.output_map is not None
    assert metadata.output_map.rank == 2


def test_the_report_describes_the_bundle_on_disk(stream: Stream, llava: Backbone, tmp_path: Path) -> None:
    """NLL, accuracy and gate, computed again from the files."""
    questions = questions_about("colours", "What colour is the small circle?")
    validation = write_task(tmp_path / "validation", questions)
    bundle, report = stream.update("colours", "--validation", str(validation)), stream.report("colours")
    bundled, examples = BundledModel(Scorer(llava), bundle), read_task(validation)
    keys = torch.cat([llava.retrieval_keys(llava.encode_example(example)) for example in examples])
    opened, _ = bundled.routing(examples)
    losses = []
    for example, key, is_open in zip(examples, keys, opened.tolist(), strict=True):
        memory = bundled.memory if is_open else None
        terms = memory.terms(key[None]) if memory else None
        losses.append(float(bundled.scorer.losses([example], memory, terms)))
    assert report["validation_nll"]["deployed"] == pytest.approx(sum(losses) / len(losses), rel=1e-4)
    right = [a == e.answer for a, e in zip(bundled.answers(examples, 8), examples, strict=True)]
    assert report["validation_accuracy"]["deployed"] == pytest.approx(sum(right) / len(right))


def test_the_same_seed_gives_the_same_digest_and_another_one_another(first: Stream, stream: Stream) -> None:
    expected = first.bundle("colours").digest
    assert stream.update("colours").digest == expected
    assert replace(stream, options=stream.options[:-4]).update("colours", "--seed", "1").digest != expected


def test_killed_at_any_moment_it_ends_with_the_same_bundle(stream: Stream, tmp_path: Path) -> None:
    expected = stream.update("colours", "--steps", "40").digest
    stream.output("colours").unlink()
    options = ("--steps", "40", "--anchors", str(tmp_path / "other"))
    progress = stream.progress("colours") / "refinement-prompt-0-0.05.safetensors"
    kill_when(progress.exists, small_select.__name__, *stream.arguments("colours", *options))
    assert progress.exists()
    assert not stream.output("colours").exists()
    assert stream.update("colours", *options).digest == expected
    assert not progress.exists()


@pytest.mark.parametrize("helps", [False, True])
def test_a_memory_that_does_not_help_has_a_status_of_its_own(
    stream: Stream, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, helps: bool
) -> None:
    """The untouched model's loss is moved, because with random weights either may be the smaller one."""
    original = BundledModel.mean_loss

    def mean_loss(model: BundledModel, *arguments: object) -> float:
        return original(model, *arguments) + (100 if helps else -100) * (model.bundle is None)

    monkeypatch.setattr(BundledModel, "mean_loss", mean_loss)
    options = ("--steps", "1", "--learning-rate", "1e-9")
    strict = replace(stream, options=tuple(option for option in stream.options if option != "--allow-worse"))
    assert strict.run("colours", *options) == (0 if helps else 3)
    assert stream.output("colours").exists() is helps
    assert (tmp_path / "anchors").exists() is helps
    assert stream.report("colours")
    assert ("no better than none" in capsys.readouterr().err) is not helps
    if not helps:
        stream.update("colours", *options)


def test_a_run_says_how_long_it_may_take_where_it_is_and_what_it_came_to(
    stream: Stream, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A model of random weights answers nothing right, so that its memory is no better than guessing."""
    monkeypatch.setattr("selector.refined.settings.has_bfloat16", lambda: False)
    default = searching(stream)
    default.update("colours")
    printed = capsys.readouterr()
    told = printed.err.splitlines()
    assert "inducekv-select: this CPU has no bfloat16 instructions: training in float32 (--precision)" in told
    estimate = next(
        number for number, line in enumerate(told) if "the best of 8 trainings of 4 steps, at most " in line
    )
    first = next(number for number, line in enumerate(told) if line.startswith("Training, "))
    assert estimate < first
    assert told[first].startswith("Training, generation from layer 1, rate 0.1, to step 1: 1 of 1 after")
    answered, base = printed.out.splitlines()[-4:-2]
    guessing = "100.0% by always giving the most frequent answer"
    assert answered == f"validation questions answered right (of 1): 0.0%; 0.0% without memory, {guessing}"
    asked = "of 12 that the gate was fitted to"
    assert base == f"base questions answered right ({asked}): 0.0%; 0.0% without memory"
    assert "no better than guessing" in told[-1]
    assert default.report("colours")["validation_accuracy"]["most_frequent_answer"] == 1


def test_a_task_is_learnt_again_without_an_example(stream: Stream, tmp_path: Path) -> None:
    """Nothing of the example is left: neither in the bundle nor among the anchors."""
    anchors = AnchorStore(tmp_path / "anchors")
    stream.update("colours", "--anchors-per-task", "12")
    second = stream.update("counts", previous="colours")
    assert "colours5" in {anchor.id for anchor in anchors.read()}
    lines = [line for line in stream.tasks["colours"].read_text().splitlines() if '"id": "colours5"' not in line]
    kept = stream.tasks["colours"].with_name("kept.jsonl")
    kept.write_text("\n".join(lines))
    again = replace(stream, tasks=stream.tasks | {"again": kept})
    assert "already holds the task 'colours'" in again.refuse("again", previous="counts")

    rest = without_entries(second, [row for row, e in enumerate(second.metadata.entries) if e.task == "colours"])
    write_bundle(rest, stream.output("rest"))
    third = again.update("again", previous="rest")
    assert list(dict.fromkeys(e.task for e in third.metadata.entries)) == ["counts", "colours"]
    assert "colours5" not in {anchor.id for anchor in anchors.read()}
    assert [task.tasks for task in anchors.tasks()] == [("counts",), ("colours",)]
    assert not any("colours5" in path.read_text() for path in anchors.folder.rglob("*.jsonl"))


def test_bad_input_is_named_and_leaves_everything_as_it_was(learnt: Stream) -> None:
    """What a call from Python refuses, too, is in `test_refusals.py`."""
    stream = learnt
    before = stream.output("colours").read_bytes()
    for options, message in [
        (["--recipe", "paper"], "--base is for the recipe 'refined' and 'document', and this run's is 'paper'"),
        (["--budget", "3"], "the budget of 3 entries does not hold 2 of a new task beside 2"),
    ]:
        assert message in stream.refuse("counts", *options, previous="colours")
    # Without --previous, beside the first task's anchors.
    assert "there is no previous bundle" in stream.refuse("counts")

    assert stream.output("colours").read_bytes() == before
    assert list(stream.folder.glob("*.safetensors")) == [stream.output("colours")]


def test_a_loss_that_is_not_a_number_writes_nothing(
    stream: Stream, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("selector.refined.training.clipped", lambda gs: {n: g * float("nan") for n, g in gs.items()})
    assert "not a finite number" in stream.refuse("colours")
    assert not stream.output("colours").exists()
    assert not (tmp_path / "anchors").exists()


def test_background_requests_are_learnt_and_belong_to_the_run(
    stream: Stream, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    background = tmp_path / "background.txt"
    background.write_text("".join(f"Open door {number}, please.\n" for number in range(5)))
    options = ("--background", str(background), "--gate-misses", "0.03")
    with_some = stream.update("colours", *options)
    printed, report = capsys.readouterr().out, stream.report("colours")
    recorded = {"gate_misses": 0.03, "background_requests": 5, "base_questions": 12}
    assert with_some.metadata.settings.items() >= recorded.items()
    assert report["pool"]["background_requests"] == 5
    prices = report["gate"]["prices"]
    assert [price["misses"] for price in prices] == [0.0, 0.01, 0.02, 0.03, 0.05, 0.1]
    assert "background" in prices[0]["opened"]
    table = printed[printed.index(" misses") :].splitlines()[:7]
    assert [line.split()[1] == "*" for line in table[1:]] == [False, False, False, True, False, False]
    assert table[4].split()[2:] == [f"{share:.1%}" for share in prices[3]["opened"].values()]

    other = stream.update("colours", "--gate-misses", "0.03", "--anchors", str(tmp_path / "other"))
    assert with_some.gate is not None
    assert other.gate is not None
    assert not torch.equal(with_some.gate.weights, other.gate.weights)
    assert torch.equal(with_some.payload_values, other.payload_values)


def test_a_second_run_with_the_same_output_is_refused_before_any_training(
    stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("selector.cli.select.load_backbone", lambda *arguments: second(stream))
        assert stream.run("colours") == 2
    assert list(stream.folder.iterdir()) == []  # neither leaves a lock behind
    stream.update("colours")


def second(stream: Stream) -> None:
    """A run of other settings while another one is at work; ends that one."""
    assert "another run is writing it" in stream.refuse("colours", "--seed", "1")
    raise KeyboardInterrupt


def test_the_model_in_bfloat16_and_on_a_device(stream: Stream, first: Stream) -> None:
    """Half of the memory for the weights; another run than that in float32. A device that is not there is named."""
    assert "cannot use the device 'nowhere': " in stream.refuse("colours", "--device", "nowhere")
    bundle = stream.update("colours", "--dtype", "bfloat16")
    assert bundle.num_entries
    assert bundle.digest != first.bundle("colours").digest
