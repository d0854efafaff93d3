"""SMoLoRA's experts are those that its description chooses, and a request keeps them while it is answered."""

import pytest
import torch
from torch import nn

from benchmarks.research.continual.methods import smolora
from benchmarks.research.continual.named import outside
from selector.backbone.generation import generate
from selector.backbone.model import Backbone


def test_answers_do_not_depend_on_the_batch(learned, model, suite):
    """A short and a long prompt, padded together and each alone, while a cache is filled."""
    stream, backbone = learned("smolora"), Backbone.load(model)
    artifact = stream.artifacts[1]
    outside(artifact.attach)(backbone, stream.states[1] / artifact.path)
    examples = [suite.tasks[0].test[0], suite.tasks[1].test[0], suite.tasks[1].test[1]]
    prompts = [backbone.encode_example(example) for example in examples]
    together = generate(backbone, prompts, 3, ignore_eos=True)
    for prompt, found in zip(prompts, together, strict=True):
        (alone,) = generate(backbone, [prompt], 3, ignore_eos=True)
        assert alone.token_ids == found.token_ids
        torch.testing.assert_close(alone.logprobs, found.logprobs, rtol=0, atol=1e-4)


class Hook:
    """Two prompts of three tokens, the second padded on the left."""

    decoding = False
    prompts = smolora.Prompted(
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
        tokens = Hook.prompts.tokens[row]
        seen = (layer.router @ x[row, tokens].mean(0)).softmax(0)
        read = (layer.reading @ Hook.prompts.text[row]).softmax(0)
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
