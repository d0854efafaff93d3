"""Methods, and answers in this process, on two tasks of the demo world, a few examples and two steps each."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors import safe_open

from benchmarks.chat import same_answer
from benchmarks.continual.__main__ import main
from benchmarks.continual.answering import OfflineModel
from benchmarks.continual.answering.plans import Plain
from benchmarks.continual.methods import METHODS, choose_methods
from benchmarks.continual.methods.adapter import attach, largest_rank, memory_bytes
from benchmarks.continual.methods.fit import Fit, share_of_rate
from inducekv_vllm.bundle import Bundle, Gate, read_bundle
from inducekv_vllm.errors import ConfigError
from inducekv_vllm.footprint import footprint_bytes
from selector.backbone.bundled_model import BundledModel
from selector.backbone.generation import generate
from selector.backbone.injection import Memory
from selector.backbone.model import Backbone
from selector.backbone.scoring import Scorer
from selector.data.anchors import AnchorStore
from selector.data.choice import choose_anchors
from selector.update.build import build_bundle
from selector.update.settings import BuildSettings
from server.demo import CHECKPOINT
from tests.benchmarks.small_streams import ORDER, command, own_folder


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


def test_a_setting_goes_to_every_method_that_has_it():
    no_memory, lora = choose_methods(["no_memory", "lora"], ["learning_rate=0.1", "steps=7"])
    assert (lora.learning_rate, lora.steps) == (0.1, 7)
    assert no_memory == METHODS["no_memory"]


def test_what_makes_an_ablation_cannot_be_set():
    refined, unrefined = choose_methods(["refined", "refined_no_refinement"], ["steps=7", "batch_size=2"])
    assert (refined.steps, unrefined.steps, unrefined.batch_size) == (7, 0, 2)
    paper, without = choose_methods(["paper", "paper_no_anchors"], ["beta=0.25"])
    assert (paper.beta, without.beta) == (0.25, 0.0)
    with pytest.raises(ConfigError, match="what makes an ablation cannot be set"):
        choose_methods(["fixed_calibration"], ["inner_steps=3"])


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
    return OfflineModel(Plain(with_artifact=bundle is not None), BundledModel(Scorer(backbone, batch_size=4), bundle))


@pytest.mark.usefixtures("without_report")
def test_the_refined_recipe_goes_on_from_its_own_bundles(data, tmp_path):
    out = tmp_path / "out"
    small = ["--method", "refined", "--set", "learning_rate=0.1", "--keep-states", "all", "--budget", "8"]
    assert main(command(data, out, *small)) == 0
    folder = own_folder(out, "refined", budget=8)
    first, second = (read_bundle(folder / name / "state" / "memory.safetensors") for name in ("00-guild", "01-field"))
    assert second.metadata.parent_digest == first.digest
    assert second.metadata.gate_tasks == ORDER
    matrix = json.loads((folder / "matrix.json").read_bytes())
    assert matrix["complete"]
    assert matrix["stored_bytes"] == [
        memory_bytes(Backbone.load(CHECKPOINT), 4 * n, 8, n) for n in (1, 2)
    ]  # 4: a share
    assert not (folder / "01-field" / "state" / "progress").exists()
    anchors = [AnchorStore(folder / name / "state" / "anchors") for name in ("00-guild", "01-field")]
    assert [len(store.read()) for store in anchors] == [5, 10]
    assert matrix["anchor_bytes"] == [store.bytes() for store in anchors]


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
    assert same_answer(" Zorp.\n", "zorp")
    assert not same_answer("zorp blick", "zorp")


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
