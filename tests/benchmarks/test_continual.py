"""The stream on two tasks of the demo world, a few examples and two steps each."""

import json
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from benchmarks.continual.__main__ import main
from benchmarks.continual.answering import OfflineAnswerer, OfflineModel, is_right
from benchmarks.continual.answering.plans import Plain
from benchmarks.continual.methods import METHODS, Artifact, choose_methods
from benchmarks.continual.methods.adapter import attach, largest_rank, memory_bytes
from benchmarks.continual.methods.fit import Fit, share_of_rate
from benchmarks.continual.stream import Run, compare, run_stream
from benchmarks.continual.suites import load_suite
from benchmarks.continual.suites.demo import load
from benchmarks.demo.model import CHECKPOINT
from inducekv_vllm.bundle import Bundle, Gate, read_bundle
from inducekv_vllm.errors import ConfigError
from inducekv_vllm.footprint import footprint_bytes
from selector.anchors import AnchorStore, choose_anchors
from selector.backbone import Backbone
from selector.build import BuildSettings, build_bundle
from selector.deployed import Deployed
from selector.injection import Memory, generate
from selector.objective import Scorer

SIZES = {"train": 12, "validation": 4, "test": 6}
BASE_SIZES = {"train": 9, "validation": 9, "test": 9}
ORDER = ("guild", "field")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    load(folder, SIZES, BASE_SIZES)
    return folder


@pytest.fixture(scope="module")
def suite(data):
    return load(data, SIZES, BASE_SIZES).ordered(ORDER)


@pytest.fixture(scope="module")
def backbone():
    return Backbone.load(CHECKPOINT)


def command(data: Path, out: Path, *more: str) -> list[str]:
    small = ["--set", "steps=2", "--set", "anchors_per_task=5", "--threads", "1"]
    return ["run", "--method", "lora_replay", "--order", *ORDER, *small, "--data", str(data), "--out", str(out), *more]


@pytest.fixture(scope="module")
def finished(data, tmp_path_factory):
    out = tmp_path_factory.mktemp("results") / "out"
    assert main(command(data, out, "--results", str(out.parent / "results.json"))) == 0
    return out


def own_folder(out: Path) -> Path:
    return out / "lora_replay" / "budget-32" / "seed-0"


def test_a_run_writes_matrix_predictions_bytes_and_seconds(finished, suite):
    matrix = json.loads((own_folder(finished) / "matrix.json").read_bytes())
    assert matrix["order"] == list(ORDER)
    assert matrix["complete"]
    assert [len(row) for row in matrix["accuracy"]] == [1, 2]
    assert len(matrix["base"]) == len(matrix["seconds"]) == 2
    for number, name in enumerate(ORDER):
        lines = (own_folder(finished) / f"{number:02d}-{name}" / "predictions.jsonl").read_text().splitlines()
        predictions = [json.loads(line) for line in lines]
        asked = [e.id for task in suite.tasks[: number + 1] for e in task.test] + [e.id for e in suite.base.test]
        assert [p["id"] for p in predictions] == asked
        names, accuracies = [*ORDER[: number + 1], "base"], [*matrix["accuracy"][number], matrix["base"][number]]
        for task, accuracy in zip(names, accuracies, strict=True):
            rights = [p["right"] for p in predictions if p["task"] == task]
            assert accuracy == pytest.approx(sum(rights) / len(rights))
    assert matrix["metrics"]["AP"] == pytest.approx(sum(matrix["accuracy"][1]) / 2)


def test_the_results_file_holds_everything_but_predictions_and_history(finished):
    results = json.loads((finished.parent / "results.json").read_bytes())
    matrix = json.loads((own_folder(finished) / "matrix.json").read_bytes())
    assert [row["seeds"] for row in results["results"]] == [[0]]
    assert results["runs"][0]["accuracy"] == matrix["accuracy"]
    assert "history" in matrix["reports"][0]
    assert "history" not in results["runs"][0]["reports"][0]
    assert results["order"] == list(ORDER)


def test_the_adapter_takes_no_more_bytes_than_the_memory(finished, backbone):
    matrix = json.loads((own_folder(finished) / "matrix.json").read_bytes())
    allowed = memory_bytes(backbone, 32, 8, len(ORDER))
    assert footprint_bytes(32, 256, 5, 2, 8, 64) < allowed
    folder = own_folder(finished) / "01-field" / "state" / "adapter"
    with safe_open(str(folder / "adapter_model.safetensors"), framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float16}
    assert len(tensors) == 2 * 5 * 7  # A and B of seven layers in each of five blocks
    stored = sum(tensor.nbytes for tensor in tensors.values())
    assert stored == matrix["stored_bytes"][1] <= allowed
    rank = matrix["reports"][1]["rank"]
    assert stored * (rank + 1) // rank > allowed  # one more would be too many


def test_anchors_are_those_that_the_selector_would_keep(finished, suite):
    store = AnchorStore(own_folder(finished) / "01-field" / "state" / "anchors")
    expected = [
        task.train[row].id
        for task in suite.tasks
        for row in choose_anchors(task.train, 5, "random", 0, keys=torch.empty(0))
    ]
    assert [anchor.id for anchor in store.read()] == expected
    reports = json.loads((own_folder(finished) / "matrix.json").read_bytes())["reports"]
    assert [report["rehearsed"] for report in reports] == [0, 5]


def test_killed_between_learning_and_answering_it_goes_on_and_counts_nothing_twice(finished, data, tmp_path):
    out = tmp_path / "out"
    shutil.copytree(finished, out)
    before = json.loads((own_folder(out) / "matrix.json").read_bytes())
    task = own_folder(out) / "01-field"
    (task / "result.json").unlink()
    adapter = task / "state" / "adapter" / "adapter_model.safetensors"
    written = adapter.stat().st_mtime_ns
    assert main(command(data, out)) == 0
    assert adapter.stat().st_mtime_ns == written  # learned once
    after = json.loads((own_folder(out) / "matrix.json").read_bytes())
    assert {**after, "seconds": None} == {**before, "seconds": None}
    assert len((task / "predictions.jsonl").read_text().splitlines()) == 6 + 6 + 9


def test_killed_while_learning_the_task_is_learned_again_to_the_same_end(finished, data, tmp_path):
    out = tmp_path / "out"
    shutil.copytree(finished, out)
    task = own_folder(out) / "01-field"
    adapter = Path("adapter") / "adapter_model.safetensors"
    before = (task / "state" / adapter).read_bytes()
    (task / "result.json").unlink()
    (task / "state").rename(task / "state.tmp")  # as it stands in the middle
    (task / "state.tmp" / "artifact.json").unlink()
    assert main(command(data, out)) == 0
    assert (task / "state" / adapter).read_bytes() == before
    assert not (task / "state.tmp").exists()


def test_a_folder_of_another_configuration_is_refused(finished, data, capsys):
    assert main(command(data, finished, "--test-limit", "3")) == 2
    assert "test_limit: 256 there, 3 here" in capsys.readouterr().err
    assert main(command(data, finished, "--set", "steps=3")) == 2
    assert "steps: 2 there, 3 here" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--order", "guild", "nonesuch"), "has no task 'nonesuch'"),
        (("--order", "guild", "guild"), "names each task once"),
        (("--test-limit", "0"), "at least one question"),
        (("--budget", "0"), "budgets must be positive"),
        (("--method", "nonesuch"), "there is no method 'nonesuch'"),
        (("--set", "nonesuch=1"), "has the setting 'nonesuch=1'"),
        (("--set", "steps=many"), "steps must be like 2, found 'many'"),
        (("--model", "/nonesuch"), "/nonesuch"),
    ],
)
def test_bad_arguments_are_named(arguments, message, data, tmp_path, capsys):
    assert main(command(data, tmp_path / "out", *arguments)) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_runs_are_compared_over_seeds():
    def one(method: str, seed: int, ap: float, base: float) -> dict:
        metrics = {"AP": ap}
        return {"method": method, "budget": 32, "seed": seed, "metrics": metrics, "base": [base], "complete": True}

    runs = [one("no_memory", 0, 0.1, 0.8), one("lora", 0, 0.4, 0.2), one("lora", 1, 0.6, 0.6)]
    unfinished = {**one("lora", 2, 1.0, 1.0), "complete": False}
    untouched, lora = compare([*runs, unfinished])
    assert untouched["metrics"]["base_retention"] == {"mean": 1.0, "standard_error": None}
    assert (lora["method"], lora["seeds"]) == ("lora", [0, 1])
    assert lora["metrics"]["AP"] == {"mean": 0.5, "standard_error": 0.1}
    assert lora["metrics"]["base_retention"] == {"mean": 0.5, "standard_error": 0.25}


def test_a_setting_goes_to_every_method_that_has_it():
    no_memory, lora = choose_methods(["no_memory", "lora"], ["learning_rate=0.1", "steps=7"])
    assert (lora.learning_rate, lora.steps) == (0.1, 7)
    assert no_memory == METHODS["no_memory"]


@dataclass(frozen=True)
class Interrupted:
    """A method that dies at its second task, once."""

    name: str = "interrupted"

    def learn(self, task, previous, out, circumstances):
        (out / "half").write_text("of a state")
        if previous is not None and not (previous.parent / "died").exists():
            (previous.parent / "died").touch()
            raise KeyboardInterrupt
        return Artifact("none", None, 0, {"after": previous is not None})


def test_any_method_can_be_interrupted(suite, tmp_path):
    run = Run(suite, Interrupted(), CHECKPOINT, 32, 0, tmp_path)
    told = []
    with pytest.raises(KeyboardInterrupt):
        run_stream(run, OfflineAnswerer(CHECKPOINT), told.append)
    assert json.loads((run.own_folder / "matrix.json").read_bytes())["complete"] is False
    collected = run_stream(run, OfflineAnswerer(CHECKPOINT), told.append)
    assert collected["complete"]
    assert [report["after"] for report in collected["reports"]] == [False, True]
    assert len(told) == 2  # one line for each task, though the first was asked for twice
    assert collected["accuracy"] == [[0.0], [0.0, 0.0]]  # the untouched model knows neither task
    assert min(collected["base"]) > 0.7


def test_a_new_adapter_changes_nothing_and_reaches_every_linear_layer(suite):
    backbone = Backbone.load(CHECKPOINT)
    prompt = backbone.encode_example(suite.tasks[0].train[0])
    before = backbone.hidden_states(prompt)
    adapted = attach(backbone, 3, seed=0)
    assert torch.equal(backbone.hidden_states(prompt), before)
    trained = [name for name, p in adapted.named_parameters() if p.requires_grad]
    assert len(trained) == 2 * 5 * 7
    assert not [name for name in trained if "vision" in name or "lm_head" in name]


def test_a_budget_below_rank_one_is_refused(backbone):
    with pytest.raises(ConfigError, match="a LoRA of rank 1 takes 44800 bytes, the budget allows 44799"):
        largest_rank(backbone, 44799)
    assert largest_rank(backbone, 44800) == 1
    assert largest_rank(backbone, 2 * 44800 - 1) == 1


def test_the_learning_rate_rises_and_falls():
    shares = [share_of_rate(step, 100) for step in range(100)]
    assert shares[9] == shares[10] == 1.0 == max(shares)
    assert shares[0] == pytest.approx(0.1)
    assert shares[55] == pytest.approx(0.5)
    assert 0 < shares[99] < 0.01


def model(backbone: Backbone, bundle: Bundle | None = None) -> OfflineModel:
    return OfflineModel(Plain(with_artifact=bundle is not None), Deployed(Scorer(backbone, batch_size=4), bundle))


def test_the_refined_recipe_goes_on_from_its_own_bundles(data, tmp_path):
    small = ["--set", "steps=2", "--set", "learning_rate=0.1", "--set", "anchors_per_task=5", "--threads", "1"]
    out = tmp_path / "out"
    assert main(["run", "--method", "refined", "--order", *ORDER, *small, "--data", str(data), "--out", str(out)]) == 0
    folder = out / "refined" / "budget-32" / "seed-0"
    first, second = (read_bundle(folder / name / "state" / "memory.safetensors") for name in ("00-guild", "01-field"))
    assert second.metadata.parent_digest == first.digest
    assert second.metadata.gate_tasks == ORDER
    matrix = json.loads((folder / "matrix.json").read_bytes())
    assert matrix["complete"]
    assert matrix["stored_bytes"] == [memory_bytes(Backbone.load(CHECKPOINT), 4 * tasks, 8, tasks) for tasks in (1, 2)]
    assert not (folder / "01-field" / "state" / "progress").exists()
    assert [len(AnchorStore(folder / name / "state" / "anchors").read()) for name in ("00-guild", "01-field")] == [
        5,
        10,
    ]


@pytest.fixture(scope="module")
def bundle(backbone, suite) -> Bundle:
    examples = [example for task in suite.tasks for example in task.train[:4]]
    return build_bundle(backbone, examples, BuildSettings(budget=8))


def with_gate(bundle: Bundle, thresholds: list[float]) -> Bundle:
    """Keys of 0: the margins are the negative thresholds, whatever is asked."""
    gate = Gate(torch.zeros(2, 2, bundle.retrieval_keys.shape[1]), torch.tensor(thresholds), ORDER)
    return replace(bundle, gate_keys=gate.keys.half(), gate_thresholds=gate.thresholds, metadata=_gated(bundle))


def _gated(bundle: Bundle):
    return bundle.metadata.model_copy(update={"format_version": 2, "gate_tasks": ORDER})


def test_a_closed_gate_gives_the_plain_answers(backbone, bundle, suite):
    examples = suite.tasks[0].test
    closed = model(backbone, with_gate(bundle, [1.0, 1.0])).answers(examples)
    assert closed == model(backbone).answers(examples)


def test_an_open_gate_retrieves_the_entries_of_its_task_alone(backbone, bundle, suite):
    examples = suite.tasks[0].test
    answers = model(backbone, with_gate(bundle, [1.0, -1.0])).answers(examples)
    entries = torch.tensor([entry.task == ORDER[1] for entry in bundle.metadata.entries])
    assert 0 < entries.sum() < len(entries)
    prior = torch.zeros(len(entries)).masked_fill(~entries, -torch.inf)
    memory, expected = Memory.from_bundle(bundle), []
    for example in examples:
        prompt = backbone.encode_example(example)
        terms = memory.terms(backbone.retrieval_keys(prompt), log_prior=prior)
        token_ids = generate(backbone, [prompt], 12, memory, terms)[0].token_ids
        expected.append(backbone.processor.tokenizer.decode(token_ids, skip_special_tokens=True).strip())
    assert answers == expected
    assert answers != model(backbone).answers(examples)


def test_a_memory_without_a_gate_uses_all_entries(backbone, bundle, suite):
    example = suite.tasks[0].test[0]
    prompt, memory = backbone.encode_example(example), Memory.from_bundle(bundle)
    expected = generate(backbone, [prompt], 12, memory, memory.terms(backbone.retrieval_keys(prompt)))[0].token_ids
    text = backbone.processor.tokenizer.decode(expected, skip_special_tokens=True).strip()
    assert model(backbone, bundle).answers([example]) == [text]


def test_answers_are_compared_without_case_space_and_final_stop():
    assert is_right(" Zorp.\n", "zorp")
    assert not is_right("zorp blick", "zorp")


def test_settings_can_be_chosen_without_a_look_at_the_test_questions(suite):
    asked = suite.asked_about("validation")
    for task, original in zip((*asked.tasks, asked.base), (*suite.tasks, suite.base), strict=True):
        assert task.test == task.validation == original.validation
    assert asked.digest() != suite.digest()
    assert suite.asked_about("test") == suite


def test_half_of_a_batch_are_anchors_and_batches_follow_from_the_seed(backbone, suite):
    first, second = suite.tasks
    anchors = first.train[:6]

    def fit(anchors, seed):
        return Fit(Scorer(backbone), [], second.train, anchors, 8, seed, autocast=False)

    batch = fit(anchors, (0, 1)).batch(5)
    assert [example.task for example in batch] == [second.name] * 4 + [first.name] * 4
    assert len({example.id for example in batch}) == 8
    assert batch == fit(anchors, (0, 1)).batch(5)
    assert batch != fit(anchors, (0, 1)).batch(6)
    assert batch != fit(anchors, (1, 1)).batch(5)
    assert {example.task for example in fit((), (0, 1)).batch(5)} == {second.name}


def test_suites_are_known_by_name(tmp_path):
    with pytest.raises(ConfigError, match="there is no suite 'nonesuch', there are: demo"):
        load_suite("nonesuch", tmp_path)
