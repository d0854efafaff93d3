"""The next version of a bundle without some entries: what is left is as before, and the gate knows no gone task."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from inducekv_vllm.bundle import Bundle, FactRecord, bundle_digest, with_entries
from inducekv_vllm.errors import BundleError, ConfigError, TaskDataError
from selector.backbone.model import Backbone
from selector.data.examples import Example, read_task
from selector.gate.data import NO_QUESTIONS, GateData
from selector.gate.fit import fit_gate
from selector.gate.settings import GateOptions
from selector.update.forget import Forgotten, refitted_gate, rows_to_forget, without_entries
from tests.bundles import G, J, L, random_bundle, random_gate, random_gated_bundle, random_maps, remade
from tests.gates import bundle_behind
from tests.task_data import record, write_task


def decoupled() -> Bundle:
    """Tasks "a" (rows 0, 1, 3) and "b" (rows 2, 4), behind a gate, with maps."""
    return random_gated_bundle(
        form="decoupled",
        weighting="uniform",
        activations={"a": "prompt", "b": "generation"},
        **random_maps((L, 5, J, 4, 8), 3, G),
    )


@pytest.mark.parametrize("make", [random_bundle, random_gated_bundle, decoupled])
def test_what_is_left_is_as_before_to_the_bit(make: Callable[[], Bundle]) -> None:
    bundle = make()
    after = without_entries(bundle, [0, 2])
    kept = [1, 3, 4]
    assert after.metadata.entries == tuple(bundle.metadata.entries[row] for row in kept)
    assert after.metadata.parent_digest == bundle.digest
    assert bundle_digest(after) == after.digest != bundle.digest
    for name, tensor in bundle.tensors().items():
        axis = {"retrieval_keys": 0, "payload_keys": 1, "payload_values": 1, "map_in": 1, "map_out": 1}.get(name)
        expected = tensor if axis is None else tensor.index_select(axis, torch.tensor(kept))
        assert torch.equal(after.tensors()[name], expected), name
    same = ("backbone", "budget", "payload_tokens", "weighting", "recipe", "settings", "adapter", "form", "gate_tasks")
    for name in (*same, "activations", "output_map", "format_version"):
        assert getattr(after.metadata, name) == getattr(bundle.metadata, name), name


def test_a_gone_task_has_no_row_in_the_gate() -> None:
    bundle = decoupled()
    after = without_entries(bundle, [2, 4])
    assert after.metadata.gate_tasks == ("a",)
    assert after.metadata.activations == {"a": "prompt"}
    gate, before = after.gate, bundle.gate
    assert gate is not None
    assert before is not None
    for name in ("center", "scale", "prototypes", "floors"):
        assert torch.equal(getattr(gate, name), getattr(before, name))
    evidence = torch.rand(before.weights.shape[1])
    assert gate.rule.decide(evidence).margins == before.rule.decide(evidence).margins[:1]


def test_nothing_of_the_forgotten_payload_is_in_the_new_bundle() -> None:
    bundle = decoupled()
    after = without_entries(bundle, [2])
    content = b"".join(tensor.numpy().tobytes() for tensor in after.tensors().values())
    for name in ("payload_keys", "payload_values", "map_in", "map_out"):
        for layer in range(L):
            row = bundle.tensors()[name][layer, 2].contiguous()
            assert row.numpy().tobytes()[:64] not in content
            assert after.tensors()[name][layer, 0].contiguous().numpy().tobytes()[:64] in content
    assert bundle.retrieval_keys[2].numpy().tobytes() not in content


class TestNamed:
    def rows(self, bundle: Bundle, **named: object) -> list[int]:
        return rows_to_forget(bundle, Forgotten(**named), "b.safetensors")  # type: ignore[arg-type]

    def test_by_id_task_and_source(self) -> None:
        bundle = random_gated_bundle()
        entries = [e.model_copy(update={"source_digest": f"s{i // 2}"}) for i, e in enumerate(bundle.metadata.entries)]
        bundle = with_entries(bundle, tuple(entries))
        assert self.rows(bundle, ids=["e3", "e0"]) == [0, 3]
        assert self.rows(bundle, source_digests=["s1"]) == [2, 3]
        assert self.rows(bundle, tasks=["b"]) == [2, 4]
        assert self.rows(bundle, ids=["e0"], tasks=["b"]) == [0, 2, 4]

    @pytest.mark.parametrize(
        ("named", "problem"),
        [
            ({"ids": ["e0", "e9"]}, "there is no entry 'e9'"),
            ({"source_digests": ["no"]}, "there is no entry of the source digest 'no'"),
            ({"tasks": ["u"]}, "there is no entry of the task 'u'"),
            ({"tasks": ["t"]}, "all 5 entries would be forgotten, and a bundle needs one: unload"),
        ],
    )
    def test_what_cannot_be_forgotten(self, named: dict[str, list[str]], problem: str) -> None:
        with pytest.raises(BundleError, match=f"b.safetensors: {problem}"):
            self.rows(random_bundle(), **named)


def test_the_gate_is_fitted_again_without_what_is_forgotten(llava: Backbone, tmp_path: Path) -> None:
    """The gate is the one that the anchors that are left would have given in the first place."""

    def examples(task: str, numbers: Iterable[int], **changes: Any) -> list[Example]:
        lines = [record(number, task=task, **changes) for number in numbers]
        for line in lines:
            line["messages"][0]["content"] = [
                *line["messages"][0]["content"][:-1],
                {"type": "text", "text": f"{task}?"},
            ]
        return read_task(write_task(tmp_path / task, lines))

    backbone = llava
    anchors = {task: examples(task, range(4 * i, 4 * i + 4)) for i, task in enumerate("abc")}
    base = examples("base", range(3))
    others = GateData(base=base)
    made_from = [example for task in "abc" for example in anchors[task][:2]]
    settings = {"gate_misses": 0.2, "seed": 5, "base_questions": 4}
    bundle = bundle_behind(random_gate(backbone.fingerprint, "abc"), backbone, made_from, settings=settings)
    rows = [0, 2, 3]  # an entry of a, both of b
    everything = [example for examples in anchors.values() for example in examples]
    fitted = refitted_gate(backbone, bundle, rows, everything, others)
    own = {"a": anchors["a"][1:], "c": anchors["c"]}  # not the example of the forgotten entry
    assert bundle.gate is not None
    expected = fit_gate(backbone, GateData(own, base), GateOptions(0.2, 5, layers=bundle.gate.layers))
    assert fitted is not None
    assert fitted.gate.tasks == ("a", "c")
    assert fitted.prices == expected.prices
    for name, tensor in fitted.gate.tensors().items():
        assert torch.equal(tensor, expected.gate.tensors()[name]), name
    assert without_entries(bundle, rows, fitted.gate).metadata.gate_tasks == ("a", "c")

    with pytest.raises(ConfigError, match="there are no anchors of the task 'c'"):
        refitted_gate(backbone, bundle, rows, anchors["a"], others)
    with pytest.raises(TaskDataError, match="base question 'e1' is also a question of the task 'a'"):
        refitted_gate(backbone, bundle, rows, everything, GateData(base=[*base, anchors["a"][1]]))
    with pytest.raises(ConfigError, match=r"fitted to base questions too.*--base"):
        refitted_gate(backbone, bundle, rows, everything, NO_QUESTIONS)
    for fitted_to, expected_error in (
        ("background_requests", r"fitted to background requests of yours too: give --background"),
        ("near_misses", r"fitted to near-misses too.*--not"),
    ):
        asked = with_entries(
            replace(bundle, metadata=bundle.metadata.model_copy(update={"settings": {fitted_to: 3}})),
            bundle.metadata.entries,
        )
        with pytest.raises(ConfigError, match=expected_error):
            refitted_gate(backbone, asked, rows, everything, others)
    assert refitted_gate(backbone, remade(random_bundle()), [0], everything, others) is None


def test_the_gate_is_fitted_again_for_tasks_of_facts_alone(
    llava: Backbone, examples: list[Example], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which have no entry, and may be all that is left."""
    facts = tuple(
        FactRecord(id=f"f{task}", task=task, source_digest=task, question="Who?", answer="I") for task in "bc"
    )
    made_from = [replace(each, task="a") for each in examples[:2]]
    bundle = bundle_behind(random_gate(llava.fingerprint, "abc"), llava, made_from, facts=facts)
    anchors = [replace(each, task=task) for each, task in zip(examples[2:5], "abc", strict=True)]
    fitted_to: list[list[str]] = []
    monkeypatch.setattr("selector.update.forget.fit_gate", lambda _, data, *__, **___: fitted_to.append(list(data.own)))
    refitted_gate(llava, bundle, [0, 1], anchors, NO_QUESTIONS)
    refitted_gate(llava, bundle, [0, 1], anchors, NO_QUESTIONS, forgotten=Forgotten(tasks=["c"]))
    assert fitted_to == [["b", "c"], ["b"]]
