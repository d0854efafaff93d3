"""Drafts are made without memory and checked with it: the answers are those without drafts."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig
from vllm.sampling_params import StructuredOutputsParams

from server.demo import CHECKPOINT
from tests.engine.parity import (
    FEWER_PROCESSES,
    WORKER_VARIABLE,
    MemoryEngine,
    Prompt,
    World,
    engine,
    greedy,
    make_world,
    prompts,
    text_prompts,
)
from tests.tiny_families import FAMILIES, TEXT_SIZES
from tests.tiny_models import save_tiny_text_model


@contextmanager
def drafting(world: World, **speculative: Any) -> Iterator[MemoryEngine]:
    options = {"enforce_eager": True, "block_size": 32, "disable_log_stats": False, "max_num_batched_tokens": 96}
    options["speculative_config"] = {"num_speculative_tokens": 3, **speculative}
    with engine(world.model, environment=FEWER_PROCESSES, **options) as llm:
        yield MemoryEngine(world, llm)


def check(served: MemoryEngine, make_prompts: Callable[[int, int], list[Prompt]]) -> None:
    """Every form and activation, open and closed; the second time, requests are decided at once."""
    questions, tasks = make_prompts(6, 18), ["a", None, "b", "b", "a", None]
    for activations in ({"a": "generation", "b": "prompt"}, {"a": "text", "b": "generation"}):
        with served.gated(questions, tasks, form="decoupled", weighting="uniform", activations=activations):
            for _ in range(2):
                answers = served.check(questions, ["gated"] * 6, greedy(max_tokens=40))
                assert [answer.decision and answer.decision.task for answer in answers] == tasks
    served.check(questions, ["sqrt", "prior", None] * 2, greedy(max_tokens=40))


def drafts(served: MemoryEngine) -> tuple[float, float]:
    """How many tokens were drafted, and accepted."""
    counts: dict[str, Any] = {metric.name: metric for metric in served.offline.llm.get_metrics()}
    drafted, accepted = (counts[f"vllm:spec_decode_num_{name}_tokens"].value for name in ("draft", "accepted"))
    return drafted, accepted


def test_ngrams(tmp_path: Path) -> None:
    world = make_world(CHECKPOINT, tmp_path)
    with drafting(world, method="ngram", prompt_lookup_max=3, prompt_lookup_min=1) as served:
        check(served, prompts)
        drafted, accepted = drafts(served)
        assert 0 < accepted < drafted
        params = greedy(
            structured_outputs=StructuredOutputsParams(choice=["red circle", "blue square"]), ignore_eos=False
        )
        questions = prompts(4, seed=3)
        with served.gated(questions, ["a", None, "b", "a"]):
            answers = served.chat(questions, ["gated"] * 4, params)
        assert {answer.output.outputs[0].text for answer in answers} <= {"red circle", "blue square"}


@pytest.mark.skipif(WORKER_VARIABLE not in os.environ, reason="vLLM's draft models need Triton: test_gpu_attention.py")
def test_a_draft_model(tmp_path: Path) -> None:
    """Its layers are not touched: their numbers and those of the served model overlap."""
    draft = save_tiny_text_model(tmp_path / "draft", lambda **sizes: LlamaConfig(**TEXT_SIZES, **sizes), seed=5)
    world = make_world(FAMILIES["llama"](tmp_path / "model"), tmp_path, make_prompts=text_prompts)
    with drafting(world, method="draft_model", model=str(draft)) as served:
        check(served, text_prompts)
        drafted, accepted = drafts(served)
        assert 0 <= accepted < drafted
