"""What a gate sees of prompts, and how a model with a bundle uses it."""

from pathlib import Path
from typing import Any

import pytest
import torch

from inducekv_vllm.backbone.placeholders import placeholder_ids
from inducekv_vllm.backbone.turns import message, turn_marks
from inducekv_vllm.gate import deciding_tokens, last_averaged, runs_of_tokens
from selector.backbone import token_values as token_values_module
from selector.backbone.bundled_model import BundledModel
from selector.backbone.loading import decoder
from selector.backbone.model import Backbone, Inputs
from selector.backbone.scoring import Scorer
from selector.backbone.token_values import asked_texts, clause_ends_of, evidence_of, token_values
from selector.data.examples import Example
from tests.bundles import decided_gate, random_gate
from tests.gates import bundle_behind
from tests.tiny_families import FAMILIES


@pytest.mark.parametrize("layers", [(0,), (0, 2)])
def test_values_are_those_of_the_layers_at_the_deciding_tokens(
    backbone: Backbone, examples: list[Example], layers: tuple[int, ...]
) -> None:
    """Of prompts of different lengths in one batch."""
    marks, placeholders = turn_marks(backbone.processor), placeholder_ids(backbone.model.config)
    encoded = [backbone.encode_example(example) for example in examples[:4]]
    found = token_values(backbone, encoded, layers, marks)
    modules = decoder(backbone.model).layers
    for inputs, values in zip(encoded, found, strict=True):
        hidden = backbone.model(**inputs, output_hidden_states=True).hidden_states
        text, media = deciding_tokens(inputs["input_ids"][0].tolist(), marks, placeholders)
        chosen = text + media
        assert values.shape == (len(chosen), len(layers), backbone.num_kv_heads * backbone.head_dim)
        for number, layer in enumerate(layers):
            of_all = modules[layer].self_attn.v_proj(modules[layer].input_layernorm(hidden[layer]))[0]
            expected = of_all[chosen]
            if layer == layers[-1]:
                expected = last_averaged(expected[:, None], len(text))[:, 0]
            torch.testing.assert_close(values[:, number], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("layers", [(0,), (0, 2)])
def test_means_are_those_of_the_values_of_the_text(
    backbone: Backbone, examples: list[Example], layers: tuple[int, ...]
) -> None:
    check_means(backbone, examples, layers)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_what_prompts_begin_with_is_computed_once(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("selector.backbone.token_values.WORTH_IT", 1)
    backbone, after = Backbone.load(FAMILIES[family](tmp_path)), list[int]()
    values_after = token_values_module._values_after

    def counted(model: Backbone, inputs: Inputs, *rest: Any) -> torch.Tensor:
        after.append(len(inputs["input_ids"]))
        return values_after(model, inputs, *rest)

    monkeypatch.setattr(token_values_module, "_values_after", counted)
    check_means(backbone, [], (0, 1))
    assert sum(after) == 3  # one has a system prompt of its own


def check_means(backbone: Backbone, examples: list[Example], layers: tuple[int, ...]) -> None:
    marks, placeholders = turn_marks(backbone.processor), placeholder_ids(backbone.model.config)
    asked = [message("user", text) for text in ("What is it?", "Who goes there, and why?", "Go", "What now?")]
    turns = [[asked[0]], [asked[1]], [message("system", "Be brief."), asked[2]], [asked[3]]]
    encoded = [backbone.encode(messages, []) for messages in turns]
    encoded += [backbone.encode_example(example) for example in examples[:2]]
    found = asked_texts(backbone, encoded, layers, marks, clause_ends := clause_ends_of(backbone).tolist())
    assert max(0 if means is None else len(means) for means in found.means[:4]) > 2  # runs of clauses
    modules = decoder(backbone.model).layers
    assert [text.strip() for text in found.texts[:4]] == ["What is it?", "Who goes there, and why?", "Go", "What now?"]
    for inputs, means in zip(encoded, found.means, strict=True):
        hidden = backbone.model(**inputs, output_hidden_states=True).hidden_states
        text = deciding_tokens(inputs["input_ids"][0].tolist(), marks, placeholders).text
        of_all = [modules[at].self_attn.v_proj(modules[at].input_layernorm(hidden[at]))[0, text] for at in layers]
        runs = runs_of_tokens(inputs["input_ids"][0, text].tolist(), clause_ends)
        expected = [torch.stack([each[list(run)].mean(dim=0) for each in of_all]) for run in runs]
        assert means is not None
        torch.testing.assert_close(means, torch.stack(expected), rtol=1e-4, atol=1e-4)


def test_evidence_does_not_depend_on_the_batch(llava: Backbone, examples: list[Example]) -> None:
    gate = random_gate(llava.fingerprint, marks=turn_marks(llava.processor))
    together = evidence_of(llava, gate, examples)
    assert (together.shape, together.dtype) == ((12, 8), torch.float32)
    assert ((together >= 0) & (together <= 1)).all()
    alone = torch.cat([evidence_of(llava, gate, [example]) for example in examples])
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-5)
    assert evidence_of(llava, gate, []).shape == (0, 8)


@pytest.mark.parametrize("task", [None, "colours"])
def test_losses_and_answers_are_behind_the_gate(llava: Backbone, examples: list[Example], task: str | None) -> None:
    gate = decided_gate(task, llava.fingerprint, ["colours"])
    scorer = Scorer(llava)
    bundled = BundledModel(scorer, bundle_behind(gate, llava, examples[:2]))
    without, keys = BundledModel(scorer, None), torch.cat([llava.retrieval_keys(scorer.prefix(e)) for e in examples])
    same = bundled.mean_loss(examples, keys) == pytest.approx(without.mean_loss(examples, keys), rel=1e-6)
    assert same == (task is None)
    assert (bundled.answers(examples[:4], 5) == without.answers(examples[:4], 5)) == (task is None)
