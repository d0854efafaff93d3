"""Every family of models that docs/models.md calls tested: vLLM against transformers, to 1e-4, in both forms.

One engine of a tiny random model a family, with bundles of its own payloads. Most families are marked `slow`: run them
with `make test-families`.
"""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.engine.one_group import one_group
from tests.engine.parity import (
    FEWER_PROCESSES,
    TOLERANCE,
    MemoryEngine,
    Prompt,
    engine,
    make_world,
    prompts,
    served_logprobs,
    text_prompts,
)
from tests.tiny_families import (
    DECOUPLED_ALONE,
    FAMILIES,
    PICTURE_FAMILIES,
    ROUTED_WITH_BIAS,
    THROUGH_TRANSFORMERS,
    small_timm,
)

WIDE = (48, 96)  # pixels: more than one tile or patch where a family cuts pictures up
IN_EVERY_RUN = ("qwen3-moe",)  # test_parity.py has two multimodal families, test_facts.py a Llama


def marked(family: str) -> Any:
    return pytest.param(family, marks=() if family in IN_EVERY_RUN else pytest.mark.slow)


@pytest.fixture(autouse=True)
def small_towers() -> Iterator[None]:
    with small_timm():
        yield


@pytest.mark.parametrize("family", [marked(family) for family in FAMILIES])
def test_parity(family: str, tmp_path: Path) -> None:
    make_prompts: Callable[[int, int], list[Prompt]] = text_prompts
    if family in PICTURE_FAMILIES:
        make_prompts = partial(prompts, size=WIDE)
    merged = () if family in DECOUPLED_ALONE else ("sqrt", "prior")
    model = FAMILIES[family](tmp_path / "model")
    world = make_world(model, tmp_path, make_prompts=make_prompts, with_merged=bool(merged))
    options = {"enforce_eager": True, "max_num_batched_tokens": 64, "block_size": 32}
    environment = {} if family in THROUGH_TRANSFORMERS else FEWER_PROCESSES
    routing = one_group() if family in ROUTED_WITH_BIAS else nullcontext()
    with routing, engine(world.model, environment=environment, **options) as llm:
        served = MemoryEngine(world, llm)
        questions, names = make_prompts(4, 1), (None, *merged, "first", "second", "other")
        # All in one batch: each question with every memory.
        answers = served.check(questions * len(names), [name for name in names for _ in questions])
        for number, prompt in enumerate(questions):
            without, *others = answers[number :: len(questions)]
            inputs = world.backbone.encode(prompt.chat_messages, prompt.images)
            assert without.output.prompt_token_ids == inputs["input_ids"][0].tolist()
            for answer in others:
                both = [served_logprobs(each.output.outputs[0])[1] for each in (answer, without)]
                assert (both[0] - both[1]).abs().max() > 100 * TOLERANCE, "the memory does nothing"
        parts = [{"role": "user", "content": [{"type": "text", "text": text} for text in ("yes or", "no?")]}]
        rendered: Any = llm._preprocess_chat_one(parts)
        assert rendered["prompt_token_ids"] == world.backbone.encode(parts, [])["input_ids"][0].tolist()
        tasks = ["a", None, "b", None]
        with served.gated(questions, tasks):
            answers = served.check(questions, ["gated"] * len(questions))
        assert [answer.decision and answer.decision.task for answer in answers] == tasks
        print(f"{family}: furthest from transformers {served.furthest}")
