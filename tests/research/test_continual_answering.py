"""What is asked of which model for each kind of artifact, and what comes of it in this process."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.lora_adapter import attach, save
from benchmarks.research.continual.answering import Ask, OfflineAnswerer, OfflineModel, plan
from benchmarks.research.continual.answering.plans import Copied, Plain, Shown
from benchmarks.research.continual.methods import Artifact
from benchmarks.research.continual.methods.gated import GATE, write_gate
from benchmarks.research.continual.methods.neighbours import EXEMPLARS, KEYS, Neighbours
from benchmarks.research.continual.suites.suite import NEW_TOKENS
from inducekv_vllm.backbone.turns import turn_marks
from inducekv_vllm.bundle import Gate
from selector.backbone.bundled_model import BundledModel
from selector.backbone.extraction import extract_keys
from selector.backbone.generation import generate
from selector.backbone.injection import TensorMemory
from selector.backbone.model import Backbone
from selector.backbone.scoring import Scorer
from selector.backbone.token_values import evidence_of
from selector.data.anchors import AnchorStore
from selector.data.examples import Example
from tests.bundles import decided_gate, random_gate
from tests.research.extracted import extracted_bundle
from tests.research.small_streams import ORDER, gated


@pytest.fixture(scope="module")
def suite(suite):
    return suite.limited(train=8, test=3, base=9)


@pytest.fixture(scope="module")
def examples(suite) -> list[Example]:
    return [example for task in suite.tasks for example in task.test]


# Memories


@pytest.mark.parametrize(("task", "used"), [("no gate", ORDER), ("field", ORDER[1:]), (None, ())])
def test_a_memory_answers_with_all_entries_or_with_those_that_its_gate_opens(task, used, backbone, suite, examples):
    stored = [example for task in suite.tasks for example in task.train[:4]]
    bundle = extracted_bundle(backbone, stored, weighting="prior")
    served = bundle if task == "no gate" else gated(bundle, gate_to(task, backbone))
    retrieved = torch.tensor([entry.task in used for entry in bundle.metadata.entries])
    prior = torch.zeros(8).masked_fill(~retrieved, -torch.inf)
    expected, plain, memory = [], [], TensorMemory.from_bundle(bundle)
    for example in examples:
        prompt = backbone.encode_example(example)
        terms = memory.terms(backbone.retrieval_keys(prompt), log_prior=prior)
        plain.append(text_of(backbone, generate(backbone, [prompt], NEW_TOKENS)))
        expected.append(text_of(backbone, generate(backbone, [prompt], NEW_TOKENS, memory, terms)))
    answers = OfflineModel(Plain(True), BundledModel(Scorer(backbone, batch_size=4), served)).answers(examples)
    assert answers == (expected if used else plain)
    assert (answers != plain) == bool(used)


def text_of(backbone: Backbone, generations) -> str:
    return backbone.processor.tokenizer.decode(generations[0].token_ids, skip_special_tokens=True).strip()


def gate_to(task: str | None, backbone: Backbone) -> Gate:
    """Open for this task, or closed, whatever is asked."""
    return decided_gate(task, backbone.fingerprint, ORDER)


# Adapters


@pytest.fixture(scope="module")
def state(model, tmp_path_factory) -> Path:
    """Holds an adapter of each task that changes answers."""
    state = tmp_path_factory.mktemp("state")
    (state / "adapters").mkdir()
    for seed, name in enumerate(ORDER):
        adapted = attach(Backbone.load(model), 4, seed)
        with torch.no_grad():
            for parameter in adapted.parameters():
                if parameter.requires_grad:
                    parameter.normal_(0, 0.2)
        save(adapted, state / "adapters" / name)
    return state


def answers(model: Path, state: Path, kind: str, path: str | None, examples: list[Example]) -> list[str]:
    return OfflineAnswerer(model, batch_size=5).prepare(Artifact(kind, path, 0, {}), state).answers(examples)


@pytest.fixture(scope="module")
def alone(model, state, examples) -> dict[str, list[str]]:
    """The answers of the untouched model and of each adapter, which all differ."""
    alone = {name: answers(model, state, "adapter", f"adapters/{name}", examples) for name in ORDER}
    alone["untouched"] = answers(model, state, "none", None, examples)
    assert all(len(set(texts)) == 3 for texts in zip(*alone.values(), strict=True))
    return alone


@pytest.mark.parametrize(
    ("task", "one_adapter", "own_adapters"),
    [(None, "untouched", "untouched"), ("field", "guild", "field"), ("guild", "guild", "guild")],
)
def test_a_closed_gate_gives_the_untouched_models_answers_and_an_open_one_the_adapters(
    task, one_adapter, own_adapters, model, backbone, state, alone, examples
):
    write_gate(gate_to(task, backbone), state / GATE)
    assert answers(model, state, "gated_adapter", "adapters/guild", examples) == alone[one_adapter]
    assert answers(model, state, "gated_adapters", "adapters", examples) == alone[own_adapters]


def test_the_gate_decides_by_what_the_untouched_model_sees_though_an_adapter_is_loaded(
    model, backbone, state, alone, examples
):
    layers = (0, backbone.num_layers - 1)
    drawn = random_gate(backbone.fingerprint, ORDER[:1], layers=layers, marks=turn_marks(backbone.processor))
    weights = drawn.weights.abs()  # [1, H]
    support = evidence_of(backbone, drawn, examples) @ weights[0]  # [n]
    middle = support.median() + 1e-4
    is_open = (support > middle).tolist()  # for half of the questions
    assert 0 < sum(is_open) < len(examples)

    def expected(opened: str, closed: str) -> list[str]:
        return [a if is_a else b for a, b, is_a in zip(alone[opened], alone[closed], is_open, strict=True)]

    write_gate(replace(drawn, weights=weights, thresholds=middle[None]), state / GATE)
    assert answers(model, state, "gated_adapter", "adapters/guild", examples) == expected("guild", "untouched")
    # Either way: the first task's own, or the second's, whose margin grows half as fast and is above 0 everywhere.
    least = support.min() / 4
    both = {"weights": torch.cat([weights, weights / 2]), "thresholds": torch.stack([middle / 2 + least, least])}
    write_gate(replace(drawn, **both, tasks=ORDER), state / GATE)
    assert answers(model, state, "gated_adapters", "adapters", examples) == expected("guild", "field")


# Exemplars


def test_a_conversation_is_what_one_would_write_by_hand(backbone, suite):
    first, second, asked = suite.tasks[0].train[:3]
    found = Ask(asked, with_artifact=False, exemplars=(first, second)).conversation
    said = [{"role": "assistant", "content": [{"type": "text", "text": e.answer}]} for e in (first, second)]
    messages = [*first.messages, said[0], *second.messages, said[1], *asked.messages]
    images = [image for one in (first, second, asked) for image in one.load_images()]
    expected, encoded = backbone.encode(messages, images), backbone.encode_example(found)
    assert expected.keys() == encoded.keys()
    assert all(torch.equal(expected[name], encoded[name]) for name in expected)
    assert (found.id, found.task) == (asked.id, asked.task)


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
    AnchorStore(tmp_path / EXEMPLARS).append(stored)
    Neighbours.none(backbone.hidden_size, 3).after(extract_keys(backbone, stored)).write(tmp_path / KEYS)
    found = plan(Artifact("exemplars", EXEMPLARS, 0, {}), tmp_path, model, lambda _: backbone)
    assert isinstance(found, Shown)
    return found


def test_the_nearest_exemplars_are_shown_the_nearest_last(shown, backbone, suite, examples):
    stored = [*suite.tasks[0].train, *suite.tasks[1].train]
    stored_keys, keys = extract_keys(backbone, stored), extract_keys(backbone, examples)
    for ask, key in zip(shown.asks(examples), keys, strict=True):
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
        monkeypatch.setattr(text, "max_position_embeddings", lengths[0] + NEW_TOKENS - missing)
        (ask,) = shown.asks([example])
        assert ask.exemplars == full.exemplars[3 - count :]
    monkeypatch.setattr(text, "max_position_embeddings", lengths[2])
    assert shown.asks([example])[0].exemplars == ()


# Copies


def test_the_majority_of_the_nearest_is_copied_and_of_equal_counts_the_nearest(monkeypatch, backbone, examples):
    stored = torch.eye(5)
    queries = torch.tensor([[9.0, 8, 7, 6, 5], [5, 6, 7, 8, 9], [0, 9, 8, 0, 7], [0, 0, 0, 9, 8]])
    monkeypatch.setattr("benchmarks.exemplars.question_keys", lambda *_: queries)
    answers = ["a", "b", "b", "c", "d"]
    for k, expected in ((1, ["a", "d", "b", "c"]), (3, ["b", "d", "b", "c"]), (4, ["b", "b", "b", "c"])):
        copied = Copied(backbone, Neighbours.none(5, k).after(stored, answers))
        assert [ask.answer for ask in copied.asks(examples[:4])] == expected
