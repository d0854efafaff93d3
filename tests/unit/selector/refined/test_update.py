"""A task learns the same whatever came before it, earlier entries stay bit for bit, and bad input is an error."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Gemma3TextConfig

from inducekv_vllm.backbone.memory_layers import usual_layers
from inducekv_vllm.bundle import Bundle, FactRecord, bundle_without_entries
from inducekv_vllm.bundle.source import source_digest_of
from inducekv_vllm.errors import BundleError, TaskDataError
from selector.backbone.bundled_model import BundledModel
from selector.backbone.model import Backbone
from selector.backbone.scoring import Scorer
from selector.data.examples import Example
from selector.data.given import read
from selector.gate.variations import text_of, with_text
from selector.recipes import settings_after
from selector.refined import candidates, shape
from selector.refined.candidates import AS_GOOD_ON_A_HYBRID, LEARNING_RATES, best_first
from selector.refined.checks import check_tasks
from selector.refined.entries import untied
from selector.refined.estimate import estimate
from selector.refined.recipe import RefinedRecipe
from selector.refined.settings import RefinedSettings
from selector.refined.training import Training
from selector.refined.update import update_refined
from selector.runtime.checkpoint import Checkpoint
from selector.runtime.running import Run
from selector.update.inputs import TaskInputs
from selector.update.result import UpdateResult
from tests.tiny_families import TEXT_SIZES, save_text

SMALL: dict[str, Any] = {
    "budget": 8,
    "payload_tokens": 2,
    "entries_per_task": 4,
    "map_rank": 0,
    "steps": 3,
    "batch_size": 4,
    "learning_rate": 0.3,
    "precision": "float32",
    "patience": None,
}


def asked_for(task: str, example: Example) -> Example:
    """The example as one of another task, which asks in other words."""
    messages = tuple(with_text(example.messages, f"Now for {task}. {text_of(example.messages)}"))
    return replace(
        example,
        task=task,
        id=f"{task}-{example.id}",
        messages=messages,
        source_digest=source_digest_of(messages, [image.read_bytes() for image in example.images]),
    )


def learn(
    llava: Backbone,
    folder: Path,
    examples: Sequence[Example],
    task: str = "colours",
    previous: Bundle | None = None,
    anchors: Sequence[Example] = (),
    **changes: Any,
) -> UpdateResult:
    named = [asked_for(task, example) for example in examples]
    inputs = TaskInputs(named[:8], named[8:], anchors, previous)
    folder.mkdir(exist_ok=True)
    checkpoint, _ = Checkpoint.open(folder / task, changes)
    settings = RefinedSettings(**(SMALL | changes))
    check_tasks(inputs, settings)
    return update_refined(llava, inputs, settings, Run(checkpoint))


def test_what_a_task_learns_does_not_depend_on_the_tasks_before(
    llava: Backbone, tmp_path: Path, examples: list[Example]
) -> None:
    settings: dict[str, Any] = {"entries_per_task": 1, "map_rank": 2, "activation": "text"}
    alone = learn(llava, tmp_path / "alone", examples, "counts", **settings).bundle
    first = learn(llava, tmp_path, examples[::-1], **settings).bundle
    anchors = [replace(e, task="colours", id=f"anchor-{e.id}") for e in examples[:2]]
    after = learn(llava, tmp_path, examples, "counts", first, anchors, **settings).bundle
    for name in ("payload_keys", "payload_values", "map_in", "map_out"):
        assert torch.equal(after.tensors()[name][:, 1:], alone.tensors()[name])


def test_a_stream_of_tasks(llava: Backbone, tmp_path: Path, examples: list[Example]) -> None:
    first = learn(llava, tmp_path, examples, activation="generation", map_rank=3).bundle
    assert (first.metadata.form, first.metadata.activations) == ("decoupled", {"colours": "generation"})
    assert torch.equal(first.value_gates, torch.ones(llava.num_layers))
    assert torch.equal(first.layer_bias, torch.zeros(llava.num_layers))
    assert first.map_in is not None
    assert first.map_out is not None
    width = llava.num_heads // llava.num_kv_heads * llava.head_dim
    assert first.map_in.shape == (llava.num_layers, 4, llava.num_kv_heads, 3, width)
    assert first.payload_values.abs().max() > 0
    assert first.map_out.abs().max() > 0
    anchors = [replace(e, id=f"anchor-{e.id}") for e in examples[:2]]
    second = learn(llava, tmp_path, examples, "counts", first, anchors, activation="text", map_rank=3).bundle
    assert second.metadata.activations == {"colours": "generation", "counts": "text"}
    assert second.metadata.gate_tasks == ("colours", "counts")
    for name in ("payload_keys", "payload_values", "map_in", "map_out"):
        assert torch.equal(second.tensors()[name][:, :4], first.tensors()[name]), "an earlier task's entries moved"
        assert second.tensors()[name].shape[1] == 8
    with pytest.raises(BundleError, match="refined for the weighting 'uniform', found 'prior'"):
        learn(llava, tmp_path, examples, "shapes", first, anchors, weighting="prior", map_rank=3)


@pytest.mark.parametrize("map_rank", [0, 2])
def test_untrained_memory_is_no_memory(llava: Backbone, tmp_path: Path, examples: list[Example], map_rank: int) -> None:
    bundle = learn(llava, tmp_path, examples, steps=0, activation="prompt", map_rank=map_rank).bundle
    scorer = Scorer(llava)
    keys = torch.cat([llava.retrieval_keys(llava.encode_example(e)) for e in examples])
    losses = [BundledModel(scorer, each).mean_loss(examples, keys) for each in (bundle, None)]
    assert losses[0] == losses[1]


@pytest.mark.parametrize(
    ("losses", "order"),
    [
        (([1.0, 1.0], [1.0, 1.0], [1.0, 1.0]), [2, 1, 0]),  # equal: the latest first
        (([1.0, 2.0], [1.1, 2.1], [1.2, 2.2]), [0, 1, 2]),  # a little worse on every question: no error
        (([1.0, 2.0], [1.1, 2.1], [0.9, 2.2]), [2, 0, 1]),  # worse by 0.05 on average, with an error of 0.15
        (([1.0, 2.0], [0.5, 2.6], [9.0, 9.0]), [1, 0, 2]),
        (([1.0], [2.0], [1.5]), [0, 2, 1]),  # one question tells no error
    ],
)
def test_the_latest_within_a_standard_error_of_the_best_comes_first(
    losses: tuple[list[float], ...], order: list[int]
) -> None:
    """Of the paired differences: what all trainings find hard does not count."""
    made = [torch.tensor(each, dtype=torch.float64) for each in losses]
    assert best_first(made, [(0, 0), (1, 0), (1, 2)]) == order
    assert best_first([], []) == []


def test_on_a_hybrid_the_latest_within_two_standard_errors_comes_first() -> None:
    made = [
        torch.tensor(each) for each in ([1.0, 2.0], [1.05, 2.25], [9.0, 9.0])
    ]  # worse by 0.15, with an error of 0.1
    assert best_first(made, [(0, 0), (2, 1), (1, 0)]) == [0, 1, 2]
    assert best_first(made, [(0, 0), (2, 1), (1, 0)], AS_GOOD_ON_A_HYBRID) == [1, 0, 2]


def test_memory_from_a_layer_on_has_no_effect_before_it(
    llava: Backbone, tmp_path: Path, examples: list[Example], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is chosen, because no loss is less than another."""
    monkeypatch.setattr(Scorer, "each_loss", lambda self, questions, *args: torch.ones(len(questions)).double())
    result = learn(llava, tmp_path, examples, activation="search", map_rank=2)
    bundle, layer = result.bundle, result.report["activation"]["first_layer"]
    assert bundle.gate is not None
    assert bundle.map_out is not None
    assert layer == bundle.gate.layers[-1] > 0
    assert result.report["activation"]["chosen"] == "generation"
    for trained in (bundle.payload_values, bundle.map_out):
        acts = trained.flatten(1).any(dim=1).tolist()  # [L]
        assert acts == [number >= layer for number in range(len(acts))]


def test_a_stream_in_some_layers_has_the_bytes_of_one_in_all(
    llava: Backbone, tmp_path: Path, examples: list[Example], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a task joins a memory in the layers that it is in, whatever new memory would be in."""
    options: dict[str, Any] = {"activation": "generation", "map_rank": 2}
    whole = learn(llava, tmp_path / "whole", examples, **options).bundle
    L = llava.num_layers
    monkeypatch.setattr(shape, "usual_layers", lambda *_: (L - 1,))
    first = learn(llava, tmp_path, examples, **options).bundle
    assert (first.metadata.layers, first.payload_tokens) == ((L - 1,), L * whole.payload_tokens)
    names = ("payload_keys", "payload_values", "map_in", "map_out")
    assert [first.tensors()[each].numel() for each in names] == [whole.tensors()[each].numel() for each in names]
    assert first.payload_values.flatten(1).any(dim=1).tolist() == [True]
    given = RefinedRecipe().inherited(first, {})
    assert (given["payload_tokens"], given["map_rank"]) == (2, 2)
    anchors = [replace(e, id=f"anchor-{e.id}") for e in examples[:2]]
    of_text = options | {"activation": "text"}
    second = learn(llava, tmp_path, examples, "counts", first, anchors, **of_text).bundle
    assert second.metadata.layers == (L - 1,)
    assert second.num_entries == 2 * first.num_entries
    later = learn(llava, tmp_path / "whole", examples, "counts", whole, anchors, **options).bundle
    assert later.metadata.layers is None
    assert learn(llava, tmp_path, examples, "alone", **of_text).bundle.metadata.layers is None


def test_tokens_of_a_short_prompt_do_not_stay_equal(llava: Backbone, tmp_path: Path, examples: list[Example]) -> None:
    keys = torch.tensor([1.0, 1.0, 2.0, 2.0, 2.0, 3.0])[:, None].expand(2, 3, 4, 6, 8)  # [L, K, J, m, D]
    apart = untied(keys, seed=0)
    firsts, others = [0, 2, 5], [1, 3, 4]
    assert torch.equal(apart[..., firsts, :], keys[..., firsts, :])
    assert len(apart[0, 0, 0].unique(dim=0)) == 6
    moved = (apart - keys)[..., others, :]
    assert float(moved.std()) == pytest.approx(0.1 * (23 / 6) ** 0.5, rel=0.1)
    bundle = learn(llava, tmp_path, examples, activation="prompt", payload_tokens=400, steps=2).bundle
    values = bundle.payload_values.movedim(3, 0).flatten(1)  # [m, all else]
    assert len(values.unique(dim=0)) == 400


def test_memory_after_facts_alone_has_the_sizes_of_new_memory(llava: Backbone) -> None:
    fact = FactRecord(id="f", task="t", source_digest="ab", question="q", answer="a")
    facts = bundle_without_entries(llava.fingerprint, recipe="refined", settings={}, facts=(fact,))
    new = settings_after(facts, RefinedRecipe(), {})
    assert (new.payload_tokens, new.map_rank) == (RefinedSettings().payload_tokens, RefinedSettings().map_rank)


def test_which_layers_memory_is_in() -> None:
    assert usual_layers(24, 896) == (8, 10, 12, 14, 16, 18, 20, 22)
    assert usual_layers(28, 1536) == (9, 11, 13, 15, 17, 19, 21, 23, 25)
    assert usual_layers(23, 896) is None
    assert usual_layers(30, 576) is None


def test_a_dry_run_times_what_is_trained_where_windows_alternate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory may begin to act at the gate's last layer, and a gate looks at layers that see all of a prompt."""
    kinds = [*["sliding_attention"] * 3, "full_attention"]
    sizes = TEXT_SIZES | {"num_hidden_layers": 4, "layer_types": kinds, "sliding_window": 16}
    backbone = Backbone.load(save_text(tmp_path / "model", Gemma3TextConfig, **sizes, query_pre_attn_scalar=64))
    examples = read([{"prompt": f"Which key opens chest {n}?", "answer": "red"} for n in range(12)], "keys")
    begun = set[int]()
    monkeypatch.setattr(Training, "take_step", lambda training: begun.add(training.problem.first_layer))
    estimate(backbone, TaskInputs(examples[:8], examples[8:], (), None), RefinedSettings(**SMALL, activation="search"))
    assert begun == {0, 3}


def measured(result: UpdateResult) -> dict[tuple[str, int, float], tuple[int, float]]:
    """By activation, first layer and rate of the search: how many steps it took, and its loss."""
    return {
        (each["activation"], each["first_layer"], each["learning_rate"]): (each["steps"], each["nll"])
        for each in result.report["activation"]["search"]
    }


def test_all_trainings_are_begun_and_one_is_finished(llava: Backbone, tmp_path: Path, examples: list[Example]) -> None:
    result = learn(llava, tmp_path, examples, activation="search", learning_rate=None, steps=32, patience=None)
    found, layer = measured(result), result.bundle.gate and result.bundle.gate.layers[-1]
    places = [("prompt", 0), ("text", 0), ("generation", 0), ("generation", layer)]
    assert set(found) == {(*place, rate) for place in places for rate in LEARNING_RATES}
    assert sorted(steps for steps, _ in found.values()) == [2] * 6 + [8, 32]
    report, settings = result.report["activation"], result.bundle.metadata.settings
    chosen = (report["chosen"], report["first_layer"], settings["learning_rate"])
    assert next(iter(found)) == chosen
    assert found[chosen][0] == 32
    assert len(result.report["refinement"]["history"]) == 32


@pytest.mark.parametrize("is_wide", [False, True])
def test_memory_on_the_generation_of_a_wide_model_begins_at_the_gates_layer(
    llava: Backbone, tmp_path: Path, examples: list[Example], monkeypatch: pytest.MonkeyPatch, is_wide: bool
) -> None:
    """Where it costs no second pass."""
    monkeypatch.setattr(candidates, "WIDE", llava.hidden_size + (not is_wide))
    result = learn(llava, tmp_path, examples, activation="generation", steps=4)
    gate = result.bundle.gate
    assert gate is not None
    layer, values = gate.layers[-1] if is_wide else 0, result.bundle.payload_values
    assert gate.layers[-1] > 0
    assert result.report["activation"]["first_layer"] == layer
    assert not values[:layer].any()
    assert values[layer:].flatten(1).any(dim=1).all()


def test_what_is_finished_is_as_if_it_had_been_trained_alone(
    llava: Backbone, tmp_path: Path, examples: list[Example]
) -> None:
    options: dict[str, Any] = {"activation": "text", "steps": 8}
    found = learn(llava, tmp_path, examples, learning_rate=None, **options)
    rate = found.bundle.metadata.settings["learning_rate"]
    alone = learn(llava, tmp_path / "alone", examples, learning_rate=rate, **options).bundle
    assert all(torch.equal(alone.tensors()[name], tensor) for name, tensor in found.bundle.tensors().items())
    steps = {of_rate: taken for (_, _, of_rate), (taken, _) in measured(found).items()}
    assert steps == dict.fromkeys(LEARNING_RATES, 2) | {rate: 8}


def test_a_wide_model_has_a_lower_rate_on_prompts_and_compares_at_the_end(
    llava: Backbone, tmp_path: Path, examples: list[Example], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what acts on the generation does so from the gate's layer on alone."""
    monkeypatch.setattr(candidates, "WIDE", llava.hidden_size)
    result = learn(llava, tmp_path, examples, activation="search", learning_rate=None, steps=8, patience=None)
    found, layer = measured(result), result.bundle.gate and result.bundle.gate.layers[-1]
    assert set(found) == {("prompt", 0, 0.02), ("text", 0, 0.02), ("generation", layer, 0.1)}
    assert [steps for steps, _ in found.values()] == [8, 8, 8]


class KilledError(Exception):
    pass


SEARCH: dict[str, Any] = {"activation": "search", "learning_rate": None, "steps": 16, "patience": None}


def test_a_search_that_is_killed_goes_on_to_the_same_end(
    llava: Backbone, tmp_path: Path, examples: list[Example], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three times: in the last training of the first rung, in one of the second, and in what is finished."""
    whole, take_step = learn(llava, tmp_path / "whole", examples, **SEARCH), Training.take_step
    for steps in (7, 3, 10):
        taken = iter(range(steps + 1))

        def killed(training: Training, taken: Iterator[int] = taken, steps: int = steps) -> None:
            if next(taken) == steps:
                raise KilledError
            take_step(training)

        with monkeypatch.context() as context:
            context.setattr(Training, "take_step", killed)
            with pytest.raises(KilledError):
                learn(llava, tmp_path / "killed", examples, **SEARCH)
    resumed = learn(llava, tmp_path / "killed", examples, **SEARCH)
    assert resumed.bundle.digest == whole.bundle.digest
    assert measured(resumed) == measured(whole)


def test_trainings_that_diverge_are_left_out(
    llava: Backbone, tmp_path: Path, examples: list[Example], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(candidates, "LEARNING_RATES", (1e30, 0.3))
    result = learn(llava, tmp_path, examples, activation="search", learning_rate=None)
    assert {trial["learning_rate"] for trial in result.report["activation"]["search"]} == {0.3}
    monkeypatch.setattr(candidates, "LEARNING_RATES", (1e30,))
    with pytest.raises((TaskDataError, BundleError)):
        learn(llava, tmp_path / "none", examples, activation="search", learning_rate=None)
