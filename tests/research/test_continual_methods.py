"""The rivals of the memory, on a tiny model and two tasks of the demo world, against what is known of each."""

import hashlib
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.fit import Fit
from benchmarks.lora_adapter import attach, memory_bytes
from benchmarks.question_keys import EARLY_LAYER, question_keys
from benchmarks.research.continual.methods import RunContext, gated
from benchmarks.research.continual.methods.ewc import FISHER, Ewc, diagonal_fisher
from benchmarks.research.continual.methods.gated import GATE, read_gate
from benchmarks.research.continual.methods.lora import AdapterTraining
from benchmarks.research.continual.methods.lwf import Lwf, divergence
from benchmarks.research.continual.methods.neighbours import Neighbours
from benchmarks.research.continual.methods.rehearsal import content_bytes, reservoir
from inducekv_vllm.backbone.footprint import footprint_bytes
from inducekv_vllm.errors import TaskDataError
from selector.backbone.loading import decoder
from selector.backbone.model import Backbone
from selector.backbone.scoring import Scorer
from selector.data.anchors import AnchorStore
from selector.data.examples import Example
from tests.research.learned_streams import BUDGET, NUM_TASKS, RIVALS, SMALL, LearnedStream
from tests.research.small_streams import ORDER
from tests.tiny_models import HEAD_DIM, HIDDEN, KV_HEADS, LAYERS

MATRICES = Path("adapter") / "adapter_model.safetensors"
RANK_BYTES = 12096  # of a LoRA of rank 1 on the tiny model: 3 layers, 2 bytes, 2016 rows and columns


@pytest.fixture(scope="module")
def allowed(backbone):
    """Bytes of the memory of a whole stream."""
    return memory_bytes(backbone, BUDGET, 8, NUM_TASKS)


# All methods


LONG = ("gated_lora_replay", "refined")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] if name in LONG else [])
        for name in (*RIVALS, "random_memory", "kcenter_memory", "paper", "refined")
    ],
)
def test_the_same_arguments_give_the_same_state_whatever_becomes_of_the_one_before(name, learned, tmp_path):
    stream = learned(name)
    shutil.copytree(stream.states[0], tmp_path / "before")
    again = stream.learn(1, tmp_path / "before", tmp_path / "again")
    shutil.rmtree(tmp_path / "before")
    assert files(tmp_path / "again") == files(stream.states[1])
    expected = stream.artifacts[1]
    assert (again.kind, again.path, again.stored_bytes) == (expected.kind, expected.path, expected.stored_bytes)


def files(state: Path) -> dict[Path, str]:
    paths = [path for path in state.rglob("*") if path.is_file()]
    return {path.relative_to(state): hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


# Bytes


def tensor_bytes(*paths: Path) -> int:
    return sum(tensor.nbytes for path in paths for tensor in load_file(path).values())


def text_bytes(example: Example) -> int:
    question = "".join(part.get("text", "") for message in example.messages for part in message["content"])
    return len(question.encode()) + len(example.answer.encode())


def recounted(kind: str, state: Path) -> int:
    """What inference needs beside the model, from the state's files and the definition alone."""
    names = ("adapter_model", "experts")
    total = tensor_bytes(*(path for name in names for path in state.rglob(f"{name}.safetensors")))
    if kind in ("gated_adapter", "gated_adapters"):
        total += tensor_bytes(state / GATE)
    if kind in ("exemplars", "copier"):
        total += tensor_bytes(state / "keys.safetensors")
    if kind == "copier":
        total += sum(len(answer.encode()) for answer in Neighbours.read(state / "keys.safetensors").answers)
    for example in AnchorStore(state / "exemplars").read():
        total += text_bytes(example) + sum(len(path.read_bytes()) for path in example.images)
    return total


@pytest.mark.parametrize("name", RIVALS)
def test_stored_bytes_are_those_of_the_files_and_never_more_than_the_memory_has(name, learned, allowed):
    stream = learned(name)
    for state, artifact in zip(stream.states, stream.artifacts, strict=True):
        assert artifact.stored_bytes == recounted(artifact.kind, state) <= allowed
    assert (stream.artifacts[1].stored_bytes > 0) == (name != "no_memory")


# Adapters


def test_an_adapter_has_the_rank_that_the_bytes_allow_in_float16(learned, backbone, allowed):
    entries = footprint_bytes(BUDGET, HIDDEN, LAYERS, KV_HEADS, 8, HEAD_DIM)
    assert entries < allowed
    artifacts = {name: learned(name).artifacts[1] for name in ("lora", "gated_lora_replay", "gated_task_lora")}
    assert {name: artifact.report["rank"] for name, artifact in artifacts.items()} == {
        "lora": allowed // RANK_BYTES,
        "gated_lora_replay": entries // RANK_BYTES,
        "gated_task_lora": entries // NUM_TASKS // RANK_BYTES,
    }
    tensors = load_file(learned("lora").states[1] / MATRICES)
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float16}
    assert len(tensors) == 2 * 7 * LAYERS


@pytest.mark.slow
def test_each_task_takes_the_learning_rate_of_the_least_validation_loss(model, suite, tmp_path, monkeypatch):
    def learn(name, **settings):
        method = replace(SMALL["gated_task_lora"], **settings)
        (tmp_path / name).mkdir()
        stream = LearnedStream(method, model, suite, tmp_path / name)
        return [a.report for a in stream.artifacts], [matrices(state) for state in stream.states]

    def matrices(state):
        return {path.parent.name: path.read_bytes() for path in state.rglob("adapter_model.safetensors")}

    monkeypatch.setattr(gated, "RATES", (1e-9, 3e-3, 1e30))  # one learns nothing, one diverges
    searched, adapters = learn("searched", learning_rate=None)
    alone, expected = learn("alone", learning_rate=3e-3)
    assert adapters == expected
    for report, single in zip(searched, alone, strict=True):
        assert (report["learning_rate"], report["validation_nll"]) == (3e-3, single["validation_nll"])
        assert list(report["rates_tried"]) == ["1e-09", "0.003", "1e+30"]
        assert report["rates_tried"]["1e+30"] is None
        assert report["rates_tried"]["1e-09"] > report["rates_tried"]["0.003"]
        assert report["compute"]["steps"] == 3 * single["compute"]["steps"]
    monkeypatch.setattr(gated, "RATES", (1e30, 1e31))
    with pytest.raises(TaskDataError, match="the loss is not a finite number"):
        learn("diverging", learning_rate=None)


def test_a_lora_may_have_a_rank_beyond_the_memorys_bytes(model, suite, tmp_path):
    stream = LearnedStream(replace(SMALL["gated_task_lora"], rank=8), model, suite, tmp_path)
    for artifact, task in zip(stream.artifacts, ORDER, strict=True):
        assert artifact.report["rank"] == 8
        assert 0 <= artifact.report["validation_accuracy"] <= 1
        tensors = load_file(stream.states[-1] / "adapters" / task / "adapter_model.safetensors")
        assert {min(tensor.shape) for tensor in tensors.values()} == {8}
    assert stream.artifacts[0].stored_bytes > stream.artifacts[0].report["bytes_allowed"]


def test_an_adapter_of_its_own_is_never_changed_again(learned):
    stream = learned("gated_task_lora")
    names = [sorted(path.name for path in (state / "adapters").iterdir()) for state in stream.states]
    assert names == [["guild"], ["field", "guild"]]
    first, second = (state / "adapters" / "guild" / "adapter_model.safetensors" for state in stream.states)
    assert first.read_bytes() == second.read_bytes()
    assert read_gate(stream.states[1] / GATE).tasks == ORDER
    assert stream.artifacts[1].report["rehearsed"] == 0


# Training


def test_half_of_a_batch_are_anchors_and_batches_follow_from_the_seed(backbone, suite):
    first, second = suite.tasks
    anchors = first.train[:6]

    def batch(anchors, seed, step=5):
        return Fit(Scorer(backbone), [], second.train, anchors, 8, seed, autocast=False).batch(step)

    mixed = batch(anchors, (0, 1))
    assert [example.task for example in mixed] == [second.name] * 4 + [first.name] * 4
    assert len({example.id for example in mixed}) == 8
    assert mixed == batch(anchors, (0, 1))
    assert mixed not in (batch(anchors, (0, 1), step=6), batch(anchors, (1, 1)))
    assert {example.task for example in batch((), (0, 1))} == {second.name}


@pytest.fixture
def training(suite, model, tmp_path):
    """An adapter in float64 whose matrices all have gradients."""
    backbone = Backbone.load(model, dtype=torch.float64)
    adapted = attach(backbone, 2, seed=0)
    parameters = [parameter for parameter in adapted.parameters() if parameter.requires_grad]
    with torch.no_grad():
        for parameter in parameters:
            parameter.normal_(0, 0.1, generator=torch.Generator().manual_seed(parameter.numel()))
    previous, out = tmp_path / "previous", tmp_path / "out"
    previous.mkdir()
    out.mkdir()
    context = RunContext(model, BUDGET, 0, 1, NUM_TASKS)
    return AdapterTraining(suite.tasks[1], previous, out, context, Scorer(backbone), parameters)


def test_fisher_is_the_mean_over_examples_of_the_squared_derivative_of_their_loss(training):
    examples = training.task.train[:3]
    fisher = diagonal_fisher(training.scorer, training.parameters, examples)
    for number in (0, 1, len(fisher) - 1):
        parameter, at = training.parameters[number], int(fisher[number].argmax())
        squares = []
        for example in examples:
            losses = []
            for step in (1e-3, -2e-3):
                parameter.data.view(-1)[at] += step
                losses.append(float(training.scorer.losses([example]).detach()))
            parameter.data.view(-1)[at] += 1e-3
            squares.append(((losses[0] - losses[1]) / 2e-3) ** 2)
        assert float(fisher[number].flatten()[at]) == pytest.approx(np.mean(squares), rel=5e-3)
        # One batch's squared gradient is another thing.
        together = torch.autograd.grad(training.scorer.losses(examples).mean(), [parameter])[0].square()
        assert float(together.flatten()[at]) != pytest.approx(np.mean(squares), rel=5e-2)


def write_fisher(state: Path, fisher: list[torch.Tensor]) -> None:
    save_file({f"{number:04d}": values for number, values in enumerate(fisher)}, state / FISHER)


def test_the_ewc_penalty_is_nothing_at_the_anchor_and_each_weights_own_parabola_around_it(training):
    fisher = [torch.rand_like(parameter) for parameter in training.parameters]
    write_fisher(training.previous, fisher)
    penalty = Ewc(strength=10.0).penalty(training)
    assert penalty([], []).item() == 0
    with torch.no_grad():
        training.parameters[1][0, 0] += 0.5
        training.parameters[2][1, 0] -= 0.1
    found, own = penalty([], []), float(fisher[1][0, 0])
    assert found.item() == pytest.approx(10 / 2 * (own * 0.25 + float(fisher[2][1, 0]) * 0.01))
    gradient = torch.autograd.grad(found, training.parameters[1])[0]
    assert float(gradient[0, 0]) == pytest.approx(10 * own * 0.5)
    assert int((gradient != 0).sum()) == 1


# LwF


def test_the_divergence_is_that_of_softened_distributions():
    old, new = np.log([0.9, 0.1]), np.log([0.5, 0.5])
    T = 2.0
    p, q = (np.exp(rows / T) / np.exp(rows / T).sum() for rows in (old, new))
    expected = T**2 * (p * np.log(p / q)).sum()
    found = divergence([torch.tensor(np.stack([old, old]))], [torch.tensor(np.stack([new, old]))], T)
    assert found.tolist() == pytest.approx([expected])  # the second token's are alike and add nothing


def test_lwf_adds_nothing_before_any_step_and_something_after_it(training):
    penalty, stronger = (Lwf(strength=strength).penalty(training) for strength in (1.0, 3.0))
    batch = training.task.train[3:6]  # other neighbours, and other padding, than they were recorded with
    before = training.scorer.predicted(batch)
    assert abs(penalty(batch, before).item()) < 1e-10
    with torch.no_grad():
        training.parameters[0] += 0.1
    after = training.scorer.predicted(batch)
    found = penalty(batch, after)
    assert found.item() > 1e-4
    assert found.item() == pytest.approx(divergence(before, after, 2.0).mean().item())
    assert stronger(batch, after).item() == pytest.approx(3 * found.item())
    assert torch.autograd.grad(found, training.parameters[0])[0].abs().max() > 0


# Rehearsal


def example(number: int, text: str = "what", task: str = "t") -> Example:
    messages = ({"role": "user", "content": [{"type": "text", "text": text}]},)
    return Example(f"e{number}", task, messages, (), "yes", f"{task} {number}")


def test_a_reservoir_is_what_it_would_be_had_it_seen_the_stream_at_once():
    rng = np.random.default_rng(0)
    stream = [example(number, "x" * int(rng.integers(1, 60))) for number in range(60)]
    for seed in range(5):
        kept: list[Example] = []
        for start in range(0, 60, 7):
            kept = reservoir(kept, stream[start : start + 7], 500, seed)
            assert sum(map(content_bytes, kept)) <= 500
        assert kept == reservoir([], stream, 500, seed)
        assert len(kept) > 5


# Neighbours


def test_neighbours_are_the_nearest_and_of_equal_ones_the_first_stored():
    keys = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.6, 0.8], [0.0, 1.0]])
    stored = Neighbours.none(2, k=3).after(keys[:2]).after(keys[2:])
    queries = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    assert stored.nearest(queries).tolist() == [[0, 2, 1], [1, 3, 2]]
    assert stored.stored_bytes == 4 * 2 * 2


def test_early_keys_are_of_the_question_and_of_the_first_layers(model, suite):
    backbone, examples = Backbone.load(model), suite.tasks[0].test[:3]
    keys = {key: question_keys(backbone, examples, key) for key in ("paper", "early")}
    for found in keys.values():
        assert found.shape == (3, HIDDEN)
        torch.testing.assert_close(found.norm(dim=1), torch.ones(3))
    with torch.no_grad():
        for weight in decoder(backbone.model).layers[EARLY_LAYER].parameters():
            weight.mul_(2)
        assert torch.equal(question_keys(backbone, examples, "early"), keys["early"])
        assert not torch.allclose(question_keys(backbone, examples, "paper"), keys["paper"])
