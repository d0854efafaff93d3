"""What is asked of which model for each kind of artifact, and what comes of it in this process."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.continual.answering import Ask, OfflineAnswerer, OfflineModel, plan
from benchmarks.continual.answering.answerer import MAX_NEW_TOKENS
from benchmarks.continual.answering.plans import Copied, Gated, Plain, Shown
from benchmarks.continual.methods import Artifact
from benchmarks.continual.methods.adapter import attach, save
from benchmarks.continual.methods.gated import GATE, write_gate
from benchmarks.continual.methods.neighbours import EXEMPLARS, KEYS, Neighbours
from inducekv_vllm.bundle import Gate
from selector.backbone.bundled_model import BundledModel
from selector.backbone.extraction import extract_keys, extract_query_keys
from selector.backbone.model import Backbone
from selector.backbone.scoring import Scorer
from selector.data.anchors import AnchorStore
from selector.data.examples import Example

ORDER = ("guild", "field")


@pytest.fixture(scope="module")
def suite(demo_suite):
    return demo_suite(12, 4, 6, *ORDER)[1].limited(train=8, test=3, base=9)


@pytest.fixture(scope="module")
def examples(suite) -> list[Example]:
    return [example for task in suite.tasks for example in task.test]


@pytest.fixture(scope="module")
def backbone(tiny_backbone):
    return tiny_backbone


@pytest.fixture(scope="module")
def keys(backbone, examples) -> torch.Tensor:
    return extract_query_keys(backbone, examples, batch_size=64)


def save_adapter(model: Path, folder: Path, seed: int) -> None:
    """An adapter that changes answers."""
    adapted = attach(Backbone.load(model), 4, seed)
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.normal_(0, 0.2)
    save(adapted, folder)


def answers(model: Path, state: Path, kind: str, path: str | None, examples: list[Example]) -> list[str]:
    return OfflineAnswerer(model, batch_size=5).prepare(Artifact(kind, path, 0, {}), state).answers(examples)


def gate_at(thresholds: list[float], hidden_size: int) -> Gate:
    """Keys of 0: the margins are the negative thresholds, whatever is asked."""
    return Gate(torch.zeros(len(thresholds), 2, hidden_size).half(), torch.tensor(thresholds), ORDER[: len(thresholds)])


def gate_between(keys: torch.Tensor) -> tuple[Gate, list[bool]]:
    """A gate of one task that is open for half of the questions, by a direction of no meaning; and for which."""
    direction = torch.randn(2, keys.shape[2], generator=torch.Generator().manual_seed(0)).half()
    margins = torch.einsum("npd,pd->n", keys.double(), direction.double())
    threshold = margins.median().float() + 1e-4
    return Gate(direction[None], threshold[None], ORDER[:1]), (margins > threshold.double()).tolist()


def test_a_closed_gate_gives_the_untouched_models_answers_and_an_open_one_the_adapters(
    model, backbone, examples, keys, tmp_path
):
    save_adapter(model, tmp_path / "adapter", seed=1)
    untouched = answers(model, tmp_path, "none", None, examples)
    adapted = answers(model, tmp_path, "adapter", "adapter", examples)
    assert all(one != other for one, other in zip(untouched, adapted, strict=True))

    write_gate(gate_at([1.0], backbone.hidden_size), tmp_path / GATE)
    assert answers(model, tmp_path, "gated_adapter", "adapter", examples) == untouched
    write_gate(gate_at([-1.0], backbone.hidden_size), tmp_path / GATE)
    assert answers(model, tmp_path, "gated_adapter", "adapter", examples) == adapted
    # The gate decides by the untouched model's keys, though the adapter is loaded.
    gate, is_open = gate_between(keys)
    assert 0 < sum(is_open) < len(examples)
    write_gate(gate, tmp_path / GATE)
    expected = [b if opened else a for a, b, opened in zip(untouched, adapted, is_open, strict=True)]
    assert answers(model, tmp_path, "gated_adapter", "adapter", examples) == expected


def test_each_task_is_answered_by_its_own_adapter(model, backbone, examples, keys, tmp_path):
    (tmp_path / "adapters").mkdir()
    alone = {}
    for seed, name in enumerate(ORDER):
        save_adapter(model, tmp_path / "adapters" / name, seed)
        alone[name] = answers(model, tmp_path, "adapter", f"adapters/{name}", examples)
    assert all(one != other for one, other in zip(*alone.values(), strict=True))
    untouched = answers(model, tmp_path, "none", None, examples)

    for thresholds, expected in (
        ([-1.0, -2.0], alone["field"]),
        ([-2.0, -1.0], alone["guild"]),
        ([1.0, 2.0], untouched),
    ):
        write_gate(gate_at(thresholds, backbone.hidden_size), tmp_path / GATE)
        assert answers(model, tmp_path, "gated_adapters", "adapters", examples) == expected

    one, is_open = gate_between(keys)  # either way: the first task's own, or the second's
    both = Gate(torch.cat([one.keys, -one.keys]), torch.cat([one.thresholds, -one.thresholds]), ORDER)
    write_gate(both, tmp_path / GATE)
    expected = [a if opened else b for a, b, opened in zip(*alone.values(), is_open, strict=True)]
    assert answers(model, tmp_path, "gated_adapters", "adapters", examples) == expected


def test_a_gated_plan_names_the_adapter_only_where_there_are_several(model, backbone, examples, tmp_path):
    write_gate(gate_at([-2.0, -1.0], backbone.hidden_size), tmp_path / GATE)
    for kind, adapter in (("gated_adapter", None), ("gated_adapters", "guild")):
        found = plan(Artifact(kind, "x", 0, {}), tmp_path, model, lambda _: backbone)
        assert isinstance(found, Gated)
        assert found.asks(examples[:2]) == [Ask(e, with_artifact=True, adapter=adapter) for e in examples[:2]]


@pytest.mark.parametrize(("kind", "with_artifact"), [("none", False), ("bundle", True), ("adapter", True)])
def test_models_and_memories_are_asked_plainly(kind, with_artifact, model, backbone, examples, tmp_path):
    found = plan(Artifact(kind, None, 0, {}), tmp_path, model, lambda _: backbone)
    assert found == Plain(with_artifact)
    assert found.asks(examples) == [Ask(example, with_artifact) for example in examples]


# Exemplars


def test_a_conversation_is_what_one_would_write_by_hand(backbone, suite):
    first, second, asked = suite.tasks[0].train[:3]
    found = Ask(asked, with_artifact=False, exemplars=(first, second)).conversation
    messages = [
        *first.messages,
        {"role": "assistant", "content": [{"type": "text", "text": first.answer}]},
        *second.messages,
        {"role": "assistant", "content": [{"type": "text", "text": second.answer}]},
        *asked.messages,
    ]
    images = [image for one in (first, second, asked) for image in one.load_images()]
    expected, encoded = backbone.encode(messages, images), backbone.encode_example(found)
    assert expected.keys() == encoded.keys()
    assert all(torch.equal(expected[name], encoded[name]) for name in expected)
    assert (found.id, found.task) == (asked.id, asked.task)


def test_conversations_differ_by_everything_that_is_in_them(suite):
    first, second, asked = suite.tasks[0].train[:3]
    other = replace(first, answer=first.answer + "?")
    shown = [(), (first,), (second,), (first, second), (second, first), (other,)]
    digests = [Ask(asked, False, exemplars).conversation.source_digest for exemplars in shown]
    assert len(set(digests)) == len(shown)
    assert Ask(asked, False).conversation == asked


def test_a_system_message_stands_first_and_once():
    def example(name: str, system: str) -> Example:
        messages = tuple(
            {"role": r, "content": [{"type": "text", "text": t}]} for r, t in (("system", system), ("user", name))
        )
        return Example(name, "t", messages, (), f"answer {name}", name)

    found = Ask(example("q", "be brief"), False, (example("e", "be long"),)).conversation
    texts = [(m["role"], m["content"][0]["text"]) for m in found.messages]
    assert texts == [("system", "be brief"), ("user", "e"), ("assistant", "answer e"), ("user", "q")]


@pytest.fixture
def shown(model, backbone, suite, tmp_path) -> Shown:
    """Three exemplars of each task before a question."""
    stored = [*suite.tasks[0].train, *suite.tasks[1].train]
    AnchorStore(tmp_path / EXEMPLARS).append(stored, run="all", policy="random", seed=0)
    Neighbours.none(backbone.hidden_size, 3).after(extract_keys(backbone, stored)).write(tmp_path / KEYS)
    found = plan(Artifact("exemplars", EXEMPLARS, 0, {}), tmp_path, model, lambda _: backbone)
    assert isinstance(found, Shown)
    return found


def test_the_nearest_exemplars_are_shown_the_nearest_last(shown, suite, examples, keys):
    stored = [*suite.tasks[0].train, *suite.tasks[1].train]
    stored_keys = extract_keys(shown.scorer.backbone, stored)
    for ask, key in zip(shown.asks(examples), keys[:, 0], strict=True):
        assert not ask.with_artifact
        order = (stored_keys.half().float() @ key).argsort(descending=True)[:3].tolist()
        assert [e.id for e in ask.exemplars] == [stored[row].id for row in reversed(order)]
    # A stored question finds itself.
    assert [ask.exemplars[-1].id for ask in shown.asks(stored)] == [example.id for example in stored]


def test_no_more_exemplars_than_the_context_holds(shown, suite, monkeypatch):
    example = suite.tasks[0].test[0]
    full = shown.asks([example])[0]
    assert len(full.exemplars) == 3
    lengths = [
        shown.scorer.prefix(Ask(example, False, full.exemplars[first:]).conversation)["input_ids"].shape[1]
        for first in range(4)
    ]
    text = shown.scorer.backbone.model.config.get_text_config(decoder=True)
    for missing, count in ((0, 3), (1, 2)):
        monkeypatch.setattr(text, "max_position_embeddings", lengths[0] + MAX_NEW_TOKENS - missing)
        (ask,) = shown.asks([example])
        assert ask.exemplars == full.exemplars[3 - count :]
    monkeypatch.setattr(text, "max_position_embeddings", lengths[2])
    assert shown.asks([example])[0].exemplars == ()


def test_exemplars_change_the_answer_and_are_answered_in_any_batch(shown, examples):
    asks = shown.asks(examples)
    one = OfflineModel(shown, bundled(shown, 1)).answers(examples)
    assert one == OfflineModel(shown, bundled(shown, 64)).answers(examples)
    plain = OfflineModel(Plain(False), bundled(shown, 64))
    assert one == plain.answers([ask.conversation for ask in asks])
    assert one != plain.answers(examples)


def bundled(shown: Shown, batch_size: int) -> BundledModel:
    return BundledModel(Scorer(shown.scorer.backbone, batch_size=batch_size), None)


# Copies


def test_the_majority_of_the_nearest_is_copied_and_of_equal_counts_the_nearest(monkeypatch, backbone, examples):
    stored = torch.eye(5)
    queries = torch.tensor([[9.0, 8, 7, 6, 5], [5, 6, 7, 8, 9], [0, 9, 8, 0, 7], [0, 0, 0, 9, 8]])
    monkeypatch.setattr("benchmarks.continual.answering.plans.extract_keys", lambda *_, **__: queries)
    answers = ["a", "b", "b", "c", "d"]
    for k, expected in ((1, ["a", "d", "b", "c"]), (3, ["b", "d", "b", "c"]), (4, ["b", "b", "b", "c"])):
        copied = Copied(backbone, Neighbours.none(5, k).after(stored, answers))
        assert [ask.answer for ask in copied.asks(examples[:4])] == expected


def test_copies_ask_no_model(model, backbone, suite, tmp_path):
    stored = suite.tasks[0].train
    keys, answers = extract_keys(backbone, stored), [example.answer for example in stored]
    Neighbours.none(backbone.hidden_size, 1).after(keys, answers).write(tmp_path / KEYS)
    found = plan(Artifact("copier", KEYS, 0, {}), tmp_path, model, lambda _: backbone)
    assert OfflineModel(found, bundled=None).answers(stored) == answers  # anything asked of it would fail
