"""Shared by the parity tests: models, their bundles, prompts with images, engines, and the comparison.

The reference is `selector.backbone.injection` in transformers, float32: it shares no attention code with the plugin.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from vllm import LLM, SamplingParams

from inducekv_vllm.bundle import Bundle, EntryRecord, Gate, write_bundle
        ours = {"worker_cls": WORKER_CLS, "scheduler_cls": SCHEDULER_CLS, "additional_config": {"inducekv": {}}}
        options = ours | options
    with pytest.MonkeyPatch.context() as patch:
        for name, value in settings.items():
            patch.setenv(name, value)
        llm = LLM(str(model), **options)
        try:
            yield llm
        finally:
            llm.llm_engine.engine_core.shutdown()


def greedy(**options: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": NEW_TOKENS, "ignore_eos": True, "logprobs": 0, **options})


def served_logprobs(completion: Any) -> tuple[list[int], Tensor]:
    """The tokens of one completion and their log-probabilities [tokens]."""
    tokens = list(completion.token_ids)
    return tokens, torch.tensor([step[t].logprob for step, t in zip(completion.logprobs, tokens, strict=True)])


def deviation(world: World, prompt: Prompt, completion: Any, bundle: Bundle | None, **options: Any) -> float:
    """`largest_deviation` of one completion."""
    return largest_deviation(world, prompt, *served_logprobs(completion), bundle, **options)


def largest_deviation(
    world: World,
    prompt: Prompt,
    tokens: Sequence[int],
    logprobs: Tensor | Sequence[float],
    bundle: Bundle | None,
    *,
    top_k: int | None = None,
    remainder: bool = True,
) -> float:
    """Largest |log p(vLLM) - log p(transformers)| over tokens; without a bundle, transformers runs the plain model."""
    inputs = world.backbone.encode(prompt.chat_messages, [prompt.image])
    if bundle is None:
        expected = score(world.backbone, [inputs], [tokens])[0]
    else:
        remainder = remainder and top_k is not None and bundle.metadata.weighting == "sqrt"
        expected = reference_logprobs(world.backbone, bundle, inputs, tokens, top_k=top_k, remainder=remainder)
    return float((torch.as_tensor(logprobs) - expected).abs().max())


class MemoryEngine:
    """An engine of a world's model with all its bundles loaded."""

    def __init__(self, world: World, llm: LLM) -> None:
        self.world, self.offline = world, MemoryLLM(llm)
        self.bundles = dict(world.bundles)
        self.memories = {name: self.offline.load_bundle(path) for name, path in world.paths.items()}

    def chat(
        self, questions: Sequence[Prompt], names: Sequence[str | None], params: SamplingParams, **options: Any
    ) -> list[MemoryAnswer]:
        """Ask each question with the memory of its name, or with none."""
        memories = [name and self.memories[name] for name in names]
        return self.offline.chat([prompt.messages for prompt in questions], params, memory=memories, **options)

    def check(
        self,
        questions: Sequence[Prompt],
        names: Sequence[str | None],
        params: SamplingParams | None = None,
        *,
        top_k: int | None = None,
        remainder: bool = True,
    ) -> list[MemoryAnswer]:
        """The answers, after every one was compared with the reference."""
        answers = self.chat(questions, names, params or greedy(), top_k=top_k, remainder=remainder)
        for prompt, answer, name in zip(questions, answers, names, strict=True):
            bundle = name and self.bundles[name]
            for completion in answer.output.outputs:
                assert len(completion.token_ids) >= NEW_TOKENS
                difference = deviation(self.world, prompt, completion, bundle, top_k=top_k, remainder=remainder)
                assert difference <= TOLERANCE
        return answers

    @contextmanager
    def gated(self, questions: Sequence[Prompt], tasks: Sequence[str | None]) -> Iterator[None]:
        """With the bundle of `gated_bundle` loaded as "gated"."""
        path = self.world.paths["prior"].with_name("gated.safetensors")
        self.bundles["gated"] = gated_bundle(self.world, questions, tasks)
        write_bundle(self.bundles["gated"], path)
        self.memories["gated"] = self.offline.load_bundle(path)
        yield
        self.offline.unload_bundle(self.memories.pop("gated"))
