"""Facts in real engines: an engine, what it is taught, and the comparison with transformers and the formula."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from inducekv_vllm.backbone.fact_reader import FactReader
from inducekv_vllm.backbone.saying import next_token
from inducekv_vllm.bundle import Bundle, FactRecord, read_bundle, write_bundle
from inducekv_vllm.frontend.offline import MemoryAnswer
from tests.engine.parity import TOLERANCE, MemoryEngine, Prompt, greedy, served_logprobs
from tests.reference import reference_logprobs

OPTIONS: dict[str, Any] = {
    "enforce_eager": True,
    "block_size": 32,
    "max_num_batched_tokens": 64,
    "logprobs_mode": "processed_logprobs",
}


class Facts:
    """An engine, and the bundles that it answers with."""

    def __init__(self, served: MemoryEngine, folder: Path) -> None:
        self.served, self.folder = served, folder
        self.reader = FactReader.of(served.world.model)

    def teach(self, name: str, facts: Sequence[FactRecord], bundle: Bundle | None = None) -> Bundle:
        path, before = self.folder / f"{name}.safetensors", None
        if bundle is not None:
            write_bundle(bundle, path)
            before = self.served.offline.load_bundle(path)
        self.served.memories[name], _ = self.served.offline.teach(facts, path, before)
        self.served.bundles[name] = made = read_bundle(path)
        return made

    def check(self, name: str, questions: Sequence[Prompt], params: Any = None, **options: Any) -> list[MemoryAnswer]:
        """Every token's log-probability is 0 if it is said as it is stored, or else the model's."""
        answers = self.served.chat(questions, [name] * len(questions), params or greedy(), **options)
        for prompt, answer in zip(questions, answers, strict=True):
            for completion in answer.output.outputs:
                self._check(name, prompt, answer, completion)
        return answers

    def _check(self, name: str, prompt: Prompt, answer: MemoryAnswer, completion: Any) -> None:
        world, bundle, decision = self.served.world, self.served.bundles[name], answer.decision
        tokens, logprobs = served_logprobs(completion)
        inputs = world.backbone.encode(prompt.chat_messages, prompt.images)
        expected = reference_logprobs(world.backbone, bundle if bundle.num_entries else None, inputs, tokens).tolist()
        assert decision is not None
        for place in range(len(tokens)):
            if next_token(decision.answer or (), tokens[:place]) is not None:
                expected[place] = 0.0  # it is certain
        torch.testing.assert_close(logprobs, torch.tensor(expected), rtol=0, atol=TOLERANCE)

    def found(self, name: str, answer: MemoryAnswer) -> list[str]:
        decision = answer.decision
        assert decision is not None
        fact = decision.fact
        return [] if fact is None else [self.served.bundles[name].metadata.facts[fact.number].id]


def asked_about(pictures: Sequence[Image.Image], question: str = "Please tell me which part this is.") -> list[Prompt]:
    """A question about each picture."""
    return [Prompt(picture, question) for picture in pictures]
