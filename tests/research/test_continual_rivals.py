"""Rivals from the paper's tables: what each adds to a LoRA or a linear layer, by hand and by brute force."""

from dataclasses import replace
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import nn

from benchmarks.lora_adapter import attach as attach_lora
from benchmarks.research.continual.answering.http import Endpoint, Endpoints, HttpAnswerer
from benchmarks.research.continual.answering.offline import OfflineModel
from benchmarks.research.continual.methods import mixture, sliced
from benchmarks.research.continual.methods.der import SAID, key
from benchmarks.research.continual.methods.lora import BUFFER
from benchmarks.research.continual.methods.mas import sensitivity
from inducekv_vllm.errors import ConfigError
from selector.backbone.model import Backbone
from selector.backbone.scoring import Scorer
from selector.data.anchors import AnchorStore
from tests.research.learned_streams import NUM_TASKS, SMALL, LearnedStream

MATRICES = Path("adapter") / "adapter_model.safetensors"


def trained(name: str, model: Path, suite, folder: Path, **settings) -> LearnedStream:
    folder.mkdir()
    return LearnedStream(replace(SMALL[name], **settings), model, suite, folder)


@pytest.mark.parametrize("name", ["o_lora", "reg_lora"])
def test_earlier_slices_stay_as_they_are_to_the_bit(name, learned):
    """Of rank 5 the first of four tasks has the first row of A and column of B, the second the second."""
    before, after = (safetensors.torch.load_file(state / MATRICES) for state in learned(name).states)
    for weight, new in after.items():
        rows = new if "lora_A" in weight else new.T
        old = before[weight] if "lora_A" in weight else before[weight].T
        assert torch.equal(rows[0], old[0])
        assert not torch.equal(rows[1], old[1])
        assert torch.equal(rows[2:], old[2:])


def test_a_stream_longer_than_the_rank_is_refused(model, suite, tmp_path):
    with pytest.raises(ConfigError, match="rank 2 has no rank for each of 4 tasks"):
        trained("o_lora", model, suite, tmp_path / "s", rank=2)


def made_up_training(monkeypatch, rank: int = NUM_TASKS):
    """Two layers, the second of four tasks."""
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.randn(*size)) for size in ((rank, 5), (6, rank), (rank, 3), (4, rank))]

    class Training:
        previous = Path("before")

        class context:
            number, num_tasks = 1, NUM_TASKS

    Training.parameters = parameters
    return Training, parameters


def test_o_lora_by_hand(monkeypatch):
    training, (a, _, c, _) = made_up_training(monkeypatch)
    found = sliced.OLora(strength=0.5).penalty(training)([], [])
    expected = 0.5 * sum(abs((m[1] @ m[0]).item()) for m in (a, c))
    assert found.item() == pytest.approx(expected, rel=1e-5)
    found.backward()
    assert a.grad[1].abs().sum() > 0
    assert a.grad[[0, 2, 3]].abs().sum() == 0


def test_reg_lora_by_hand(monkeypatch):
    training, (a, b, c, d) = made_up_training(monkeypatch)
    places = [torch.tensor([0, 7]), torch.tensor([2])]
    monkeypatch.setattr(sliced, "read_places", lambda _: places)
    found = sliced.RegLora(strength=10.0).penalty(training)([], [])
    first, second = torch.outer(b[:, 1], a[1]), torch.outer(d[:, 1], c[1])
    held = [(abs(first[0, 0]) + abs(first[1, 2])) / 2, abs(second[0, 2])]
    assert found.item() == pytest.approx((10 * sum(held) / 2).item(), rel=1e-5)


def test_reg_lora_keeps_the_places_of_every_task(learned):
    stream = learned("reg_lora")
    first, second = (safetensors.torch.load_file(state / sliced.LARGE) for state in stream.states)
    for name, places in first.items():
        assert set(places.tolist()) <= set(second[name].tolist())
    tensors = safetensors.torch.load_file(stream.states[0] / MATRICES)
    names = [name for name in tensors if "lora_A" in name]
    sizes = sorted(tensors[name].shape[1] * len(tensors[name.replace("lora_A", "lora_B")]) for name in names)
    assert sorted(len(places) for places in first.values()) == [-(-size * 2 // 100) for size in sizes]


def test_mas_needs_no_answers(model, suite):
    """Against the gradient of each example on its own, and with other words of the same places."""
    backbone = Backbone.load(model)
    adapted = attach_lora(backbone, 1, 0)
    parameters = [p for p in adapted.parameters() if p.requires_grad]
    for parameter in parameters[1::2]:
        nn.init.normal_(parameter)
    scorer, examples = Scorer(backbone), suite.tasks[0].train[:3]
    found = sensitivity(scorer, parameters, examples)
    expected = [torch.zeros_like(p) for p in parameters]
    for example in examples:
        output = scorer.predicted([example])[0].exp()
        for total, gradient in zip(expected, torch.autograd.grad((output**2).sum(), parameters), strict=True):
            total += gradient.abs() / 3
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs)
    assert sum(float(each.sum()) for each in found) > 0


def test_der_stores_what_was_said_and_takes_no_more_than_its_bytes(learned):
    stream = learned("der_plus_plus")
    for state, artifact in zip(stream.states, stream.artifacts, strict=True):
        said = safetensors.torch.load_file(state / SAID)
        buffer = AnchorStore(state / BUFFER).read() if (state / BUFFER).exists() else []
        assert {key(example) for example in buffer} == set(said)
        assert artifact.report["buffer_bytes"] <= artifact.report["buffer_bytes_allowed"]
        assert sum(each.nbytes for each in said.values()) < artifact.report["buffer_bytes"]
        for each in said.values():
            torch.testing.assert_close(each.float().exp().sum(-1), torch.ones(len(each)), rtol=0, atol=0.02)
    assert artifact.report["buffer"] > 0


def test_a_mixture_by_brute_force():
    torch.manual_seed(0)
    layer = mixture.Mixture(nn.Linear(5, 4), experts=3, rank=2)
    nn.init.normal_(layer.up)
    x = torch.randn(2, 3, 5)
    found = layer(x)
    for row in range(2):
        for token in range(3):
            of = x[row, token]
            weights = (layer.router @ of).softmax(0)
            expected = layer.layer(of)
            for expert in range(3):
                expected = expected + 2 * weights[expert] * layer.up[expert] @ (layer.down[expert] @ of)
            torch.testing.assert_close(found[row, token], expected)


def test_a_mixture_answers_in_this_process_also_beside_servers(learned, model, suite):
    """What was stored is what answers; nothing is asked of a server, and none is there."""
    stream = learned("moe_lora")
    nowhere = Endpoint("http://127.0.0.1:9", "none")
    answerer = HttpAnswerer(model, Endpoints(nowhere, nowhere), new_tokens=4)
    answering = answerer.prepare(stream.artifacts[1], stream.states[1])
    assert isinstance(answering, OfflineModel)
    assert len(answering.answers(suite.tasks[0].test[:2])) == 2
    layers = [m for m in answering.bundled.scorer.backbone.model.modules() if isinstance(m, mixture.Mixture)]
    stored = safetensors.torch.load_file(stream.states[1] / mixture.FILE)
    assert len(layers) == len(stored) // 3
    assert any(bool(layer.up.any()) for layer in layers)
