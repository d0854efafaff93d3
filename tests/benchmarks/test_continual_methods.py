"""The rivals of the memory, on a tiny model and two tasks of the demo world, against what is known of each."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.continual.methods import RunContext, gated, neighbours
from benchmarks.continual.methods.ewc import FISHER, Ewc, diagonal_fisher
from benchmarks.continual.methods.fit import Fit, share_of_rate
from benchmarks.continual.methods.gated import GATE, gate_of, read_gate, write_gate
from benchmarks.continual.methods.lora import AdapterTraining
from benchmarks.continual.methods.lwf import Lwf, divergence, record
from benchmarks.continual.methods.neighbours import Neighbours, drawn
from benchmarks.continual.methods.rehearsal import content_bytes, reservoir
from benchmarks.lora_adapter import attach, largest_rank, memory_bytes
from inducekv_vllm.backbone.footprint import footprint_bytes
from inducekv_vllm.bundle.tensors import DTYPES
from inducekv_vllm.errors import ConfigError, TaskDataError
from inducekv_vllm.gate import TurnMarks
from selector.backbone.model import Backbone
from selector.backbone.scoring import Scorer
from selector.data.anchors import AnchorStore
from selector.data.choice import choose_anchors
from selector.data.examples import Example
from selector.gate.fit import FittedGate
from tests.benchmarks.learned_streams import BUDGET, NUM_TASKS, RIVALS, SMALL, LearnedStream
from tests.benchmarks.small_streams import ORDER
from tests.inducekv_vllm.bundles import random_gate
from tests.tiny_models import HEAD_DIM, HIDDEN, KV_HEADS, LAYERS

MATRICES = Path("adapter") / "adapter_model.safetensors"
RANK_BYTES = 12096  # of a LoRA of rank 1 on the tiny model: 3 layers, 2 bytes, 2016 rows and columns


@pytest.fixture(scope="module")
def allowed(backbone):
    """Bytes of the memory of a whole stream."""
    return memory_bytes(backbone, BUDGET, 8, NUM_TASKS)


# All methods


@pytest.mark.parametrize("name", [*RIVALS, "random_memory", "kcenter_memory", "paper", "refined_no_quotas"])
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
    total = tensor_bytes(*state.rglob("adapter_model.safetensors"))
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


@pytest.mark.parametrize("name", ["prompt_replay", "knn_copier"])
def test_every_task_has_an_equal_share_of_the_bytes_and_fills_it(name, model, suite, tmp_path, monkeypatch):
    share = 2000  # holds some of the few examples, not all
    monkeypatch.setattr(neighbours, "memory_bytes", lambda *_: NUM_TASKS * share)
    stream = LearnedStream(SMALL[name], model, suite, tmp_path)
    sizes = [recounted(stream.artifacts[0].kind, state) for state in stream.states]
    for size, task, artifact in zip(np.diff(sizes, prepend=0), suite.tasks, stream.artifacts, strict=True):
        contents = [content_bytes(e) if name == "prompt_replay" else len(e.answer.encode()) for e in task.train]
        assert 0 < artifact.report["of_this_task"] < len(task.train)
        assert size <= share < size + max(contents) + 2 * HIDDEN


def test_a_share_that_holds_nothing_is_refused(suite):
    examples = suite.tasks[0].train
    with pytest.raises(ConfigError, match="task 'guild' takes 7 bytes where it is stored, the budget"):
        drawn(examples, [7] * 12, 6, (0, 0))
    assert len(drawn(examples, [7] * 12, 20, (0, 0))) == 2


# Adapters


def test_a_new_adapter_changes_nothing_and_reaches_every_linear_layer(suite, model):
    backbone = Backbone.load(model)
    prompt = backbone.encode_example(suite.tasks[0].train[0])
    before = backbone.hidden_states(prompt)
    adapted = attach(backbone, 3, seed=0)
    assert torch.equal(backbone.hidden_states(prompt), before)
    trained = [name for name, p in adapted.named_parameters() if p.requires_grad]
    assert len(trained) == 2 * 7 * LAYERS  # A and B of seven layers in each block
    assert not [name for name in trained if "vision" in name or "lm_head" in name]


@pytest.mark.parametrize(("modules", "per_layer"), [("all", 7), ("attention", 4), ("o_proj", 1), ("mlp", 3)])
def test_an_adapter_of_some_layers(suite, model, modules, per_layer):
    backbone = Backbone.load(model)
    allowed = 10 * RANK_BYTES
    rank = largest_rank(backbone, allowed, modules)
    adapted = attach(backbone, rank, seed=0, modules=modules)
    trained = [parameter for parameter in adapted.parameters() if parameter.requires_grad]
    assert len(trained) == 2 * per_layer * LAYERS
    assert 2 * sum(parameter.numel() for parameter in trained) <= allowed
    assert 2 * sum(parameter.numel() for parameter in trained) * (rank + 1) > allowed * rank


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


def test_a_budget_below_rank_one_is_refused(learned, backbone, suite, tmp_path):
    with pytest.raises(ConfigError, match=f"a LoRA of rank 1 takes {RANK_BYTES} bytes, the budget allows 12095"):
        largest_rank(backbone, RANK_BYTES - 1)
    assert largest_rank(backbone, RANK_BYTES) == largest_rank(backbone, 2 * RANK_BYTES - 1) == 1
    stream = learned("gated_task_lora")
    with pytest.raises(ConfigError, match="a LoRA of rank 1 takes"):
        stream.method.learn(suite.tasks[0], None, tmp_path, replace(stream.context(0), num_tasks=100))


def test_plain_lora_is_replay_without_the_replay(learned):
    """Nothing but what is rehearsed differs: after the first task the two are the same."""
    plain, replay = ([(state / MATRICES).read_bytes() for state in learned(n).states] for n in ("lora", "lora_replay"))
    assert plain[0] == replay[0]
    assert plain[1] != replay[1]
    assert json.dumps(learned("lora").artifacts[1].report)


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


def test_an_adapter_of_its_own_is_never_changed_again(learned):
    stream = learned("gated_task_lora")
    names = [sorted(path.name for path in (state / "adapters").iterdir()) for state in stream.states]
    assert names == [["guild"], ["field", "guild"]]
    first, second = (state / "adapters" / "guild" / "adapter_model.safetensors" for state in stream.states)
    assert first.read_bytes() == second.read_bytes()
    assert read_gate(stream.states[1] / GATE).tasks == ORDER
    assert stream.artifacts[1].report["rehearsed"] == 0


# Training


def test_the_learning_rate_rises_and_falls():
    shares = [share_of_rate(step, 100) for step in range(100)]
    assert shares[9] == shares[10] == 1.0 == max(shares)
    assert shares[0] == pytest.approx(0.1)
    assert shares[55] == pytest.approx(0.5)
    assert 0 < shares[99] < 0.01


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


def test_fisher_of_tasks_adds_up_with_decay(training):
    old = [torch.full_like(parameter, 2.0) for parameter in training.parameters]
    write_fisher(training.previous, old)
    report = Ewc(decay=0.5, fisher_examples=100).keep(training)
    new = diagonal_fisher(training.scorer, training.parameters, training.task.train)
    stored = load_file(training.out / FISHER)
    for number, values in enumerate(new):
        torch.testing.assert_close(stored[f"{number:04d}"], 1.0 + values)
    assert report["training_state_bytes"] == sum(values.nbytes for values in new)
    assert report["fisher_trace"] == pytest.approx(sum(float(values.sum()) for values in new))


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


def test_ewc_holds_the_adapter_where_it_is(learned, suite, tmp_path):
    stream = learned("ewc")
    before, moved = load_file(stream.states[0] / MATRICES), {}
    for strength in (0.0, 1e12):
        out = tmp_path / str(strength)
        out.mkdir()
        # Several steps: the first one is taken at the anchor, where the penalty has no gradient.
        held = replace(stream.method, strength=strength, steps=20, learning_rate=1e-3, precision="float32")
        held.learn(suite.tasks[1], stream.states[0], out, stream.context(1))
        after = load_file(out / MATRICES)
        moved[strength] = sum(float((after[key].float() - before[key].float()).square().sum()) for key in before)
    assert moved[1e12] < 0.5 * moved[0.0]


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


def test_recorded_answers_are_those_of_the_old_model(training):
    examples = training.task.train[:5]
    recorded = record(training.scorer, examples, batch_size=2)
    for example in examples:
        alone = training.scorer.predicted([example])[0]
        assert not recorded[example.id].requires_grad
        torch.testing.assert_close(recorded[example.id], alone.detach())


def test_a_penalty_is_minimised_with_the_loss_and_reported_beside_it(training):
    calls = []

    def penalty(batch, predicted):
        calls.append([len(rows) for rows in predicted])
        return training.parameters[0].square().sum()

    fit = Fit(training.scorer, training.parameters, training.task.train, (), 3, (0, 0), autocast=False, penalty=penalty)
    terms = fit.losses(fit.batch(0))
    assert float(terms["loss"]) == pytest.approx(float(training.scorer.losses(fit.batch(0)).mean()))
    assert float(terms["penalty"]) == pytest.approx(float(training.parameters[0].square().sum()))
    assert calls == [[len(training.scorer.answer_tokens(e)) for e in fit.batch(0)]]
    assert set(fit.run(1e-3, 1)[0]) == {"step", "loss", "penalty"}


# Rehearsal


def example(number: int, text: str = "what", task: str = "t") -> Example:
    messages = ({"role": "user", "content": [{"type": "text", "text": text}]},)
    return Example(f"e{number}", task, messages, (), "yes", f"{task} {number}")


def test_the_bytes_of_an_example_are_its_pictures_and_its_text(suite):
    one = suite.tasks[0].train[0]
    assert content_bytes(one) == one.images[0].stat().st_size + text_bytes(one)
    assert content_bytes(example(0, "wärm")) == 5 + 3


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


def test_a_reservoir_is_uniform_over_the_stream():
    stream = [example(number, task="first" if number < 8 else "second") for number in range(12)]
    draws, keep = 600, 4
    counts = Counter()
    for seed in range(draws):
        kept = reservoir(reservoir([], stream[:8], keep * 7, seed), stream[8:], keep * 7, seed)
        assert len(kept) == keep
        counts.update(e.id for e in kept)
    # Each is kept with probability 1/3; five standard deviations of a binomial of 600 draws.
    expected, deviation = draws * keep / 12, math.sqrt(draws * 1 / 3 * 2 / 3)
    assert all(abs(counts[e.id] - expected) < 5 * deviation for e in stream)


def test_er_rehearses_a_sample_of_the_whole_stream_within_the_bytes(learned, suite, allowed):
    stream = learned("er_replay")
    kept: list[Example] = []
    for state, artifact, task in zip(stream.states, stream.artifacts, suite.tasks, strict=True):
        kept = reservoir(kept, task.train, allowed, 0)
        stored = AnchorStore(state / "buffer").read()
        assert {e.id for e in stored} == {e.id for e in kept}
        assert artifact.report["buffer_bytes"] == sum(map(content_bytes, stored)) <= allowed
    rehearsed = [artifact.report["rehearsed"] for artifact in stream.artifacts]
    assert rehearsed == [0, stream.artifacts[0].report["buffer"]]


def test_anchors_are_those_that_the_selector_would_keep(learned, suite):
    stream = learned("lora_replay")
    unread = torch.empty(0)  # "random" reads no keys
    chosen = [t.train[row].id for t in suite.tasks for row in choose_anchors(t.train, 5, "random", 0, keys=unread)]
    assert [anchor.id for anchor in AnchorStore(stream.states[1] / "anchors").read()] == chosen
    assert [artifact.report["rehearsed"] for artifact in stream.artifacts] == [0, 5]


# The gate


def test_a_gate_is_fitted_to_what_is_known_of_every_task(suite, backbone, monkeypatch):
    asked = []
    monkeypatch.setattr(
        gated, "fit_gate", lambda *args, **options: asked.append((args, options)) or FittedGate("gate", ())
    )
    first, second = suite.tasks
    assert gate_of(backbone, second, first.train[:5], suite.base.train, seed=7) == "gate"
    (args, options) = asked[0]
    own = {first.name: [*first.train[:5]], second.name: [*second.train, *second.validation]}
    assert args == (backbone, own, suite.base.train)
    assert options == {"seed": 7}


def test_a_gate_comes_back_as_it_was_written(tmp_path):
    gate = random_gate(tasks=("a", "b", "c"), marks=TurnMarks((5, 7), 9))
    assert write_gate(gate, tmp_path / "gate") == tensor_bytes(tmp_path / "gate")
    found = read_gate(tmp_path / "gate")
    assert (found.tasks, found.layers, found.marks) == (gate.tasks, gate.layers, gate.marks)
    for name, tensor in gate.tensors().items():
        assert torch.equal(found.tensors()[name], tensor.to(DTYPES[name])), name


def test_the_base_questions_are_shown_to_the_gate_or_not(learned, suite, tmp_path):
    stream = learned("gated_lora_replay")
    replace(stream.method, base=False).learn(suite.tasks[0], None, tmp_path, stream.context(0))
    unseen, seen = (read_gate(state / GATE) for state in (tmp_path, stream.states[0]))
    assert not torch.equal(unseen.center, seen.center)


# Neighbours


def test_neighbours_are_the_nearest_and_of_equal_ones_the_first_stored():
    keys = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.6, 0.8], [0.0, 1.0]])
    stored = Neighbours.none(2, k=3).after(keys[:2]).after(keys[2:])
    queries = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    assert stored.nearest(queries).tolist() == [[0, 2, 1], [1, 3, 2]]
    assert stored.stored_bytes == 4 * 2 * 2


def test_neighbours_come_back_as_they_were_written(tmp_path):
    stored = Neighbours.none(3, k=2).after(torch.randn(2, 3), ["ja", "größer"])
    stored.write(tmp_path / "keys")
    found = Neighbours.read(tmp_path / "keys")
    assert torch.equal(found.keys, stored.keys)
    assert (found.k, found.answers) == (2, ("ja", "größer"))
    assert found.stored_bytes == 2 * 3 * 2 + 2 + 8
