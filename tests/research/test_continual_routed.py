"""Rivals that decide on each request (HiDe-LLaVA, a stand-in for SMoE, SMoLoRA, L2P), against other computations."""

from __future__ import annotations

from dataclasses import replace

import pytest
import safetensors.torch
import torch
from peft import PeftModel
from torch import nn

from benchmarks.research.continual.methods import l2p, smolora, task_experts
from benchmarks.research.continual.methods.prompts import embedded
from benchmarks.research.continual.named import outside
from inducekv_vllm.errors import ConfigError
from selector.backbone.generation import answer_logprobs, generate
from selector.backbone.model import Backbone, pool_retrieval_keys
from tests.research.learned_streams import SMALL, LearnedStream

ROUTED = ["hide", "smoe_stand_in", "smolora", "l2p"]


def served(stream: LearnedStream, model, number: int = 1) -> Backbone:
    """The model with what the method stored after a task."""
    backbone, artifact = Backbone.load(model), stream.artifacts[number]
    outside(artifact.attach)(backbone, stream.states[number] / artifact.path)
    return backbone


@pytest.mark.parametrize("name", ROUTED)
def test_answers_do_not_depend_on_the_batch(name, learned, model, suite):
    """A short and a long prompt, padded together and each alone, while a cache is filled."""
    backbone = served(learned(name), model)
    examples = [suite.tasks[0].test[0], suite.tasks[1].test[0], suite.tasks[1].test[1]]
    prompts = [backbone.encode_example(example) for example in examples]
    together = generate(backbone, prompts, 3, ignore_eos=True)
    for prompt, found in zip(prompts, together, strict=True):
        (alone,) = generate(backbone, [prompt], 3, ignore_eos=True)
        assert alone.token_ids == found.token_ids
        torch.testing.assert_close(alone.logprobs, found.logprobs, rtol=0, atol=1e-4)


def adapter_alone(stream: LearnedStream, model, task: str, number: int = 1) -> Backbone:
    """The model with one task's expert, as peft puts it there."""
    backbone = Backbone.load(model)
    PeftModel.from_pretrained(backbone.model, str(stream.states[number] / task_experts.EXPERTS / task))
    return backbone


@pytest.mark.parametrize("name", ["hide", "smoe_stand_in"])
def test_with_one_task_its_expert_answers_as_peft_runs_it(name, learned, model, suite):
    stream = learned(name)
    example = suite.tasks[0].test[0]
    ours, theirs = served(stream, model, 0), adapter_alone(stream, model, suite.tasks[0].name, 0)
    prompt, answer = ours.encode_example(example), [5, 6]
    found, expected = (answer_logprobs(backbone, [prompt], [answer])[0] for backbone in (ours, theirs))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


def test_hide_fuses_all_layers_but_the_last(learned, model, suite):
    """Peft's matrices, summed below the last layer; there each expert's own product with its weight."""
    stream = learned("hide")
    ours, bare = served(stream, model), Backbone.load(model)
    example = suite.tasks[1].test[0]
    prompt = bare.encode_example(example)
    means = safetensors.torch.load_file(stream.states[1] / task_experts.EXPERTS / task_experts.MEANS)["means"].float()
    found = task_experts.features(bare, prompt)[0]
    cosines = torch.stack([torch.cosine_similarity(found, mean, dim=-1).mean() for mean in means])
    weights = (cosines / 0.1).softmax(0)
    experts = task_experts.read_experts(stream.states[1] / task_experts.EXPERTS)
    last = f"layers.{bare.num_layers - 1}."
    for name, (down, up) in experts.items():
        if last in name:
            change = sum(2 * weights[e] * up[e] @ down[e] for e in range(2))
        else:
            change = 2 * (up[0] + up[1]) @ (down[0] + down[1])
        bare.model.get_submodule(name).weight.data += change
    (expected,) = answer_logprobs(bare, [prompt], [[5]])
    (mine,) = generate(ours, [prompt], 1, ignore_eos=True)
    assert mine.logprobs[0].item() == pytest.approx(expected[0].max().item(), abs=1e-4)


def test_experts_are_drawn_by_themselves(learned):
    """Equal ones would add up where they are fused."""
    experts = task_experts.read_experts(learned("hide").states[1] / task_experts.EXPERTS)
    for down, _ in experts.values():
        assert torch.cosine_similarity(down[0].flatten(), down[1].flatten(), dim=0).abs() < 0.9


def test_means_as_released_start_from_noise_and_stop_growing():
    ones = torch.ones(48, 2, 3)
    exact, released = ones.mean(0), task_experts.released_mean(ones, seed=0)
    noise = 0.1 * torch.randn(2, 3, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(released, (noise + 48 * exact) / 49, rtol=1e-2, atol=1e-2)
    torch.manual_seed(0)
    many = torch.cat([torch.zeros(12000, 2, 1), torch.ones(6000, 2, 1)])
    late = task_experts.released_mean(many, seed=0)
    assert (late > many.mean(0) + 0.05).all()  # the last thousands weigh more than their share


def test_smoe_stand_in_takes_the_expert_that_predicts_the_prompt_best(learned, model, suite):
    stream = learned("smoe_stand_in")
    experts = [adapter_alone(stream, model, task.name) for task in suite.tasks[:2]]
    with_drawn_experts(stream.states[1] / task_experts.EXPERTS)
    ours = served(stream, model)
    alone = [adapter_alone(stream, model, task.name) for task in suite.tasks[:2]]
    chosen = set()
    for example in (*suite.tasks[0].test[:4], *suite.tasks[1].test[:4]):
        prompt = experts[0].encode_example(example)
        losses = [task_experts.text_nll(backbone, prompt).item() for backbone in alone]
        best = min((0, 1), key=lambda number: losses[number])
        chosen.add(best)
        (expected,) = answer_logprobs(alone[best], [prompt], [[5]])
        (found,) = generate(ours, [prompt], 1, ignore_eos=True)
        assert found.logprobs[0].item() == pytest.approx(expected[0].max().item(), abs=1e-4)
    assert chosen == {0, 1}


def with_drawn_experts(folder) -> None:
    """Two steps of training change nothing that decides: these experts differ."""
    for seed, file in enumerate(sorted(folder.rglob("adapter_model.safetensors"))):
        torch.manual_seed(seed)
        tensors = {name: 0.3 * torch.randn_like(t) for name, t in safetensors.torch.load_file(file).items()}
        safetensors.torch.save_file(tensors, file, metadata={"format": "pt"})


def test_text_nll_by_hand(model, suite):
    backbone = Backbone.load(model)
    prompts = [backbone.encode_example(task.test[0]) for task in suite.tasks[:2]]
    found = task_experts.text_nll(backbone, backbone.collate(prompts))
    for row, prompt in enumerate(prompts):
        ids = prompt["input_ids"][0]
        text = ~task_experts.picture_tokens(backbone, ids)
        loss = nn.functional.cross_entropy(backbone.model(**prompt).logits[0, :-1], ids[1:], reduction="none")
        assert found[row].item() == pytest.approx(loss[text[1:]].mean().item(), rel=1e-4)


class Hook:
    """Two prompts of three tokens, the second padded on the left."""

    decoding = False
    decided = smolora.Prompted(
        text=torch.tensor([[1.0, -2.0], [-1.0, 0.5]]), tokens=torch.tensor([[True] * 3, [False, True, True]])
    )


@pytest.mark.parametrize("routing", ["trained", "released"])
def test_smolora_by_brute_force(routing):
    torch.manual_seed(0)
    layer = smolora.Halves(nn.Linear(5, 4), 4, 2, 2, Hook(), routing)
    nn.init.normal_(layer.up)
    x = torch.randn(2, 3, 5)
    found = layer(x)
    for row in range(2):
        tokens = Hook.decided.tokens[row]
        seen = (layer.router @ x[row, tokens].mean(0)).softmax(0)
        read = (layer.reading @ Hook.decided.text[row]).softmax(0)
        experts = [(int(seen.argmax()), seen.max()), (2 + int(read.argmax()), read.max())]
        for token in range(3):
            of = x[row, token]
            mix, expected = (layer.mixing @ of).softmax(0), layer.layer(of)
            for half, (expert, probability) in enumerate(experts):
                scale = 2 * mix[half] * (probability if routing == "trained" else 1)
                expected = expected + scale * layer.up[expert] @ (layer.down[expert] @ of)
            torch.testing.assert_close(found[row, token], expected)
    found.sum().backward()
    for router in (layer.router, layer.reading):
        assert (router.grad is not None and bool(router.grad.any())) == (routing == "trained")


def test_smolora_keeps_its_choice_while_it_answers():
    layer = smolora.Halves(nn.Linear(5, 4), 4, 2, 2, hook := Hook(), "trained")
    layer(torch.randn(2, 3, 5))
    kept = layer._of_prompts
    hook.decoding = True
    layer(torch.randn(2, 1, 5))
    assert layer._of_prompts is kept


def test_l2p_against_embeddings_put_before_the_prompt(learned, model, suite):
    """The nearest prompts of the pool, and the model's own embeddings after them."""
    stream = learned("l2p")
    ours, bare = served(stream, model), Backbone.load(model)
    pool = l2p.read_pool(stream.states[1] / l2p.FILE)
    example = suite.tasks[0].test[0]
    prompt = bare.encode_example(example)
    query = pool_retrieval_keys(bare.hidden_states(prompt), prompt["attention_mask"])[0]
    cosines = torch.cosine_similarity(query[None], pool.keys, dim=-1)
    before = torch.cat([pool.prompts[number] for number in cosines.topk(pool.top).indices])
    embeddings = torch.cat([before[None], embedded(bare, prompt)], dim=1)
    expected = bare.model(inputs_embeds=embeddings).logits[0, -1].log_softmax(-1)
    (found,) = generate(ours, [ours.encode_example(example)], 1, ignore_eos=True)
    assert found.token_ids == [int(expected.argmax())]
    assert found.logprobs[0].item() == pytest.approx(expected.max().item(), abs=1e-4)


def test_l2p_trains_prompts_and_keys(learned):
    first, second = (l2p.read_pool(state / l2p.FILE) for state in learned("l2p").states)
    for before, after in zip(first.parameters(), second.parameters(), strict=True):
        assert not torch.equal(before, after)


def test_a_pool_that_is_too_large_is_refused(model, suite, tmp_path):
    with pytest.raises(ConfigError, match=r"500 prompts of 2 tokens take \d+ bytes, the budget allows \d+"):
        LearnedStream(replace(SMALL["l2p"], pool=500), model, suite, tmp_path)
