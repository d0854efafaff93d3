"""Injection: by loops, by transformers' own cache, by finite differences.

`selector.backbone.injection` is what the server is held against, so it is held against other ways of computing the
same thing, none of which share its code.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from inducekv_vllm.bundle import Bundle, EntryRecord
from inducekv_vllm.errors import UnsupportedModel
from inducekv_vllm.gate import RelevanceGate
from inducekv_vllm.retrieval.entry_terms import Weighting, entry_terms
from inducekv_vllm.retrieval.index import KeyIndex
from selector.backbone.extraction import extract
from selector.backbone.gate_rule import gated_prior
from selector.backbone.generation import generate, score
from selector.backbone.injection import TensorMemory, Terms, attend, attention, injected
from selector.backbone.model import Backbone, Inputs
from selector.data.examples import Example
from selector.paper.calibration import leaf
from tests.bundles import decided_gate, random_bundle, random_gate
from tests.reference import reference_logprobs, terms_from_pages
from tests.unit.selector.backbone.memories import B, M, entries, every_setting, random_memory
from tests.unit.selector.exact import in_float64, unit_vectors

ANSWER = [40, 71, 300, 112, 55, 226]
all_settings = every_setting(top_k=2)


@pytest.fixture(scope="module")
def prompts(backbone: Backbone, examples: list[Example]) -> list[Inputs]:
    return [backbone.encode_example(example) for example in examples[:3]]


def query_keys(backbone: Backbone, prompts: Sequence[Inputs]) -> Tensor:
    return torch.cat([backbone.retrieval_keys(prompt) for prompt in prompts])


def text_prompt(backbone: Backbone) -> Inputs:
    return backbone.encode([{"role": "user", "content": [{"type": "text", "text": "yes"}]}], [])


# Attention


def loop_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    visible: Tensor,
    scaling: float,
    memory: TensorMemory,
    terms: Terms,
    layer: int,
) -> Tensor:
    """The same by loops over requests, heads and tokens, in float64."""
    n, H, T, D = query.shape
    J, S = key.shape[1:3]
    output = torch.zeros(n, T, H, D, dtype=torch.float64)
    bias, gate = float(memory.layer_bias[layer]), float(memory.value_gates[layer])
    for row in range(n):
        for head in range(H):
            kv_head = head // (H // J)
            for t in range(T):
                q = query[row, head, t].double()
                logits, values = [float(terms.log_remainder[row]) + bias], [torch.zeros(D, dtype=torch.float64)]
                for entry in range(memory.payload_keys.shape[1]):
                    for s in range(memory.payload_keys.shape[3]):
                        k = memory.payload_keys[layer, entry, kv_head, s].double()
                        v = memory.payload_values[layer, entry, kv_head, s].double()
                        logit = float(terms.key_scale[row, entry]) * float(q @ k) * scaling
                        logits.append(logit + float(terms.log_weight[row, entry]) + bias)
                        values.append(float(terms.value_scale[row, entry]) * gate * v)
                for s in range(S):
                    if visible[min(row, len(visible) - 1), t, s]:
                        logits.append(float(q @ key[row, kv_head, s].double()) * scaling)
                        values.append(value[row, kv_head, s].double())
                output[row, t, head] = torch.tensor(logits).double().softmax(0) @ torch.stack(values)
    return output


def test_attention_by_loops(llava: Backbone) -> None:
    """Of any terms, those of a retrieval or not; one entry is left out, and one request has no remainder."""
    torch.manual_seed(1)
    memory = random_memory(llava, "sqrt")
    n, H, J, T, S, D = 2, 4, 2, 3, 6, llava.head_dim
    log_weight = torch.randn(n, B)
    log_weight[0, 2] = -math.inf
    terms = Terms(torch.rand(n, B), log_weight, torch.rand(n, B), torch.tensor([math.log(3), -math.inf]))
    query, key, value = torch.randn(n, H, T, D), torch.randn(n, J, S, D), torch.randn(n, J, S, D)
    visible = torch.ones(n, T, S, dtype=torch.bool).tril(S - T)
    visible[1, :, :2] = False  # padding on the left
    arguments = (query, key, value, visible, 0.2, memory, terms, 1)
    torch.testing.assert_close(attend(*arguments).double(), loop_attention(*arguments), rtol=1e-5, atol=1e-5)


# Retrieval


def served_terms(memory: TensorMemory, query_keys: Tensor, settings: dict[str, Any]) -> Terms:
    """The terms of requests with these query keys [n, d] as the plugin computes them."""
    index = KeyIndex(memory.retrieval_keys.numpy())
    options = {"payload_tokens": M, "num_entries": B, "remainder": settings.get("remainder", False)}
    pages = []
    for key in query_keys.numpy():
        retrieval = index.search(key, float(memory.temperature), settings.get("top_k"))
        pages.append(entry_terms(retrieval, memory.weighting, **options))
    return terms_from_pages(pages, B)


@all_settings
def test_terms_are_those_of_the_served_retrieval(
    llava: Backbone, weighting: Weighting, settings: dict[str, Any]
) -> None:
    memory = random_memory(llava, weighting)
    keys = unit_vectors(4, llava.hidden_size, seed=2)
    expected, found = served_terms(memory, keys, settings), memory.terms(keys, **settings)
    left_out = expected.log_weight == -math.inf
    assert torch.equal(found.log_weight == -math.inf, left_out)
    for name in ("key_scale", "value_scale", "log_weight"):
        ours, theirs = getattr(found, name)[~left_out], getattr(expected, name)[~left_out]
        torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=1e-6)
    torch.testing.assert_close(found.log_remainder, expected.log_remainder)


# The whole model


def through_the_cache(
    backbone: Backbone, memory: TensorMemory, terms: Terms, prompt: Inputs, answer: Sequence[int]
) -> Tensor:
    """Eq. inject_rewrite by transformers alone: the scaled payloads as earlier cache tokens, positions from 0.

    For one request and weighting "sqrt" with layer bias 0: there the injected tokens are ordinary tokens.
    """
    cache = DynamicCache(config=backbone.model.config.get_text_config())
    scale = terms.key_scale[0][:, None, None, None]  # [B, 1, 1, 1]
    for layer in range(backbone.num_layers):
        keys = (scale * memory.payload_keys[layer]).transpose(0, 1).flatten(1, 2)  # [J, B m, D]
        values = (scale * memory.payload_values[layer] * memory.value_gates[layer]).transpose(0, 1).flatten(1, 2)
        cache.update(keys[None], values[None], layer)
    inputs = dict(prompt)
    inputs["input_ids"] = torch.cat([prompt["input_ids"], torch.tensor([list(answer)])], dim=1)
    T = inputs["input_ids"].shape[1]
    if "mm_token_type_ids" in inputs:
        inputs["mm_token_type_ids"] = torch.nn.functional.pad(inputs["mm_token_type_ids"], (0, len(answer)))
        inputs["position_ids"], _ = backbone.model.model.get_rope_index(
            inputs["input_ids"], inputs["mm_token_type_ids"], image_grid_thw=inputs["image_grid_thw"]
        )
    else:
        inputs["position_ids"] = torch.arange(T)[None]
    inputs["attention_mask"] = torch.ones(1, B * M + T, dtype=torch.int64)
    logits = backbone.model(**inputs, past_key_values=cache).logits[0, -len(answer) - 1 : -1]
    return logits.log_softmax(-1)[torch.arange(len(answer)), list(answer)]


def test_the_papers_form_is_a_longer_cache(backbone: Backbone, prompts: list[Inputs]) -> None:
    memory = random_memory(backbone, "sqrt")
    memory = replace(memory, layer_bias=torch.zeros(backbone.num_layers))
    for prompt in prompts:
        terms = memory.terms(backbone.retrieval_keys(prompt))
        (found,) = score(backbone, [prompt], [ANSWER], memory, terms)
        expected = through_the_cache(backbone, memory, terms, prompt, ANSWER)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
        (plain,) = score(backbone, [prompt], [ANSWER])
        assert (found - plain).abs().max() > 1e-2  # the memory did something


@pytest.mark.parametrize(("weighting", "same"), [("prior", True), ("sqrt", False)])
def test_prior_weighting_does_not_grow_with_the_memory(
    backbone: Backbone, prompts: list[Inputs], weighting: Weighting, same: bool
) -> None:
    """Every entry twice: the same weights by halves, and the same answer; the paper's form gives another one."""
    memory = random_memory(backbone, weighting)
    doubled = entries(memory, [*range(B), *range(B)])
    key = backbone.retrieval_keys(prompts[0])
    (once,) = score(backbone, prompts[:1], [ANSWER], memory, memory.terms(key))
    (twice,) = score(backbone, prompts[:1], [ANSWER], doubled, doubled.terms(key))
    assert torch.allclose(once, twice, rtol=0, atol=1e-5) is same


def test_no_memory_is_the_plain_model_to_the_bit(backbone: Backbone, prompts: list[Inputs]) -> None:
    before = score(backbone, prompts, [ANSWER] * 3)
    memory = random_memory(backbone, "sqrt")
    with_memory = score(backbone, prompts, [ANSWER] * 3, memory, memory.terms(query_keys(backbone, prompts)))
    after = score(backbone, prompts, [ANSWER] * 3)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert not torch.allclose(before[0], with_memory[0], atol=1e-2)


@all_settings
def test_each_row_has_its_own_terms(
    backbone: Backbone, prompts: list[Inputs], weighting: Weighting, settings: dict[str, Any]
) -> None:
    memory = random_memory(backbone, weighting)
    answers = [ANSWER, ANSWER[:1], ANSWER[2:]]
    together = score(backbone, prompts, answers, memory, memory.terms(query_keys(backbone, prompts), **settings))
    for prompt, answer, found in zip(prompts, answers, together, strict=True):
        terms = memory.terms(backbone.retrieval_keys(prompt), **settings)
        (alone,) = score(backbone, [prompt], [answer], memory, terms)
        assert found.shape == (len(answer),)
        torch.testing.assert_close(found, alone, rtol=0, atol=2e-5)


@all_settings
def test_generation_with_a_cache_is_scoring_without(
    backbone: Backbone, prompts: list[Inputs], weighting: Weighting, settings: dict[str, Any]
) -> None:
    memory = random_memory(backbone, weighting)
    terms = memory.terms(query_keys(backbone, prompts), **settings)
    generations = generate(backbone, prompts, 16, memory, terms, ignore_eos=True)
    assert [len(generation.token_ids) for generation in generations] == [16, 16, 16]
    scores = score(backbone, prompts, [generation.token_ids for generation in generations], memory, terms)
    for generation, found in zip(generations, scores, strict=True):
        torch.testing.assert_close(found, generation.logprobs, rtol=0, atol=3e-5)


# Gradients


@pytest.mark.parametrize("model", ["llava", "qwen3-vl"])
@all_settings
def test_gradients_are_finite_differences(
    model_folders: dict[str, Path],
    examples: list[Example],
    model: str,
    weighting: Weighting,
    settings: dict[str, Any],
) -> None:
    """Central differences in float64 along random directions, against gradients of the answer's log-probability."""
    backbone = in_float64(model_folders[model])
    prompt = backbone.encode_example(examples[0])
    key = backbone.retrieval_keys(prompt).double()
    memory = random_memory(backbone, weighting, torch.float64)
    names = ("temperature", "value_gates", "layer_bias", "payload_keys", "payload_values")
    values = {name: getattr(memory, name) for name in names}
    values["log_prior"] = torch.tensor([0.1, 0.3, 0.2, 0.15, 0.25], dtype=torch.float64).log()

    def log_probability(values: dict[str, Tensor]) -> Tensor:
        changed = replace(memory, **{name: values[name] for name in names})
        terms = changed.terms(key, log_prior=values["log_prior"], **settings)
        return score(backbone, [prompt], [ANSWER], changed, terms)[0].sum()

    leaves = {name: leaf(value) for name, value in values.items()}
    gradients = torch.autograd.grad(log_probability(leaves), list(leaves.values()))
    for (name, value), gradient in zip(values.items(), gradients, strict=True):
        direction = torch.randn(value.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
        up, down = value + 1e-5 * direction, value - 1e-5 * direction
        with torch.no_grad():
            difference = (log_probability(values | {name: up}) - log_probability(values | {name: down})) / 2e-5
        assert gradient.isfinite().all()
        assert gradient.abs().max() > 1e-6, name
        torch.testing.assert_close((gradient * direction).sum(), difference, rtol=1e-6, atol=1e-8)


# Bundles


@pytest.fixture(scope="module")
def make_bundle(backbone: Backbone, examples: list[Example]) -> Callable[..., Bundle]:
    """Makes a bundle of what is extracted from five examples; the first is of the task `tasks[0]`, and so on."""
    chosen, layers = examples[3:8], backbone.num_layers
    extraction = extract(backbone, chosen, M)

    def make(tasks: str, **changes: Any) -> Bundle:
        labelled = zip(chosen, tasks, strict=True)
        return random_bundle(
            retrieval_keys=extraction.keys,
            payload_keys=extraction.payload_keys,
            payload_values=extraction.payload_values,
            value_gates=torch.full((layers,), 0.5),
            layer_bias=torch.linspace(-1, 1, layers),
            backbone=backbone.fingerprint,
            entries=tuple(EntryRecord(id=e.id, task=task, source_digest=e.source_digest) for e, task in labelled),
            **changes,
        )

    return make


# The relevance gate


def test_the_torch_gate_decides_as_the_served_one() -> None:
    gate, entry_tasks = random_gate(tasks="abc", seed=1), "abcab"
    evidence = torch.rand(200, 8, generator=torch.Generator().manual_seed(1))
    rule = RelevanceGate(gate.weights.numpy(), gate.thresholds.numpy(), gate.tasks)
    is_open, log_prior = gated_prior(gate, entry_tasks, evidence)
    assert (is_open.shape, is_open.dtype, log_prior.shape) == ((200,), torch.bool, (200, 5))
    seen = set()
    for row, found in enumerate(evidence.numpy()):
        decision = rule.decide(found)
        assert bool(is_open[row]) == (decision.task is not None)
        nearest = gate.tasks[int(decision.margins.argmax())]
        assert log_prior[row].tolist() == [0.0 if task == nearest else -math.inf for task in entry_tasks]
        seen.add(decision.task)
    assert seen == {"a", "b", "c", None}


def test_reference_logprobs_behind_a_gate(
    backbone: Backbone, prompts: list[Inputs], make_bundle: Callable[..., Bundle]
) -> None:
    key = backbone.retrieval_keys(prompts[0])  # [1, d]

    def gated_bundle(task: str | None) -> Bundle:
        gate = decided_gate(task, backbone.fingerprint)
        return make_bundle("ababa", weighting="prior", recipe="refined", gate=gate)

    closed = reference_logprobs(backbone, gated_bundle(None), prompts[0], ANSWER)
    assert torch.equal(closed, score(backbone, prompts[:1], [ANSWER])[0])
    for task, rows in (("b", [1, 3]), ("a", [0, 2, 4])):
        bundle = gated_bundle(task)
        alone = entries(TensorMemory.from_bundle(bundle), rows)  # of the task alone
        for top_k in (None, 1):
            found = reference_logprobs(backbone, bundle, prompts[0], ANSWER, top_k=top_k)
            (expected,) = score(backbone, prompts[:1], [ANSWER], alone, alone.terms(key, top_k=top_k))
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
            assert (found - closed).abs().max() > 1e-3


def test_an_error_inside_ends_the_injection(llava: Backbone) -> None:
    memory = random_memory(llava, "sqrt")
    terms = memory.terms(torch.zeros(1, llava.hidden_size))
    prompt = text_prompt(llava)
    plain = llava.model(**prompt).logits
    with pytest.raises(RuntimeError), injected(memory, terms):
        raise RuntimeError
    assert torch.equal(llava.model(**prompt).logits, plain)


@pytest.mark.parametrize("feature", ["softcap", "s_aux", "sliding_window", "position_bias"])
def test_attention_of_another_kind_is_refused(llava: Backbone, feature: str) -> None:
    memory = random_memory(llava, "sqrt")
    zeros = torch.zeros(1, 4, 2, llava.head_dim)
    terms = memory.terms(torch.zeros(1, llava.hidden_size))
    for refusing in (memory, replace(memory, form="decoupled")):
        if refusing.form == "merged" or feature == "position_bias":
            with injected(refusing, terms), pytest.raises(UnsupportedModel, match=feature):
                attention(llava.attention_layers()[0], zeros, zeros, zeros, None, 1.0, **{feature: 4})
