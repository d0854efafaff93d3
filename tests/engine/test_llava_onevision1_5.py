"""LLaVA-OneVision-1.5 in vLLM: several pictures of any size, videos, and two ranks of tensor parallelism."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from selector.backbone.generation import score
from tests.engine.albums import albums
from tests.engine.parity import (
    TOLERANCE,
    MemoryEngine,
    World,
    engine,
    greedy,
    make_world,
    prompts,
    served_logprobs,
)
from tests.reference import reference_logprobs
from tests.tiny_families import save_llava_onevision1_5

pytestmark = pytest.mark.slow
OPTIONS = {"enforce_eager": True, "max_num_batched_tokens": 64, "block_size": 32}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    folder = tmp_path_factory.mktemp("llava-onevision-1.5")
    return make_world(save_llava_onevision1_5(folder / "model"), folder, with_merged=True)


@pytest.fixture(scope="module", params=[1, 2], ids=["one rank", "two ranks"])
def served(request: pytest.FixtureRequest, world: World) -> Iterator[MemoryEngine]:
    ranks: dict[str, Any] = {"tensor_parallel_size": request.param, **OPTIONS}
    environment = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"} if request.param > 1 else {}
    with engine(world.model, environment=environment, limit_mm_per_prompt={"image": 3, "video": 1}, **ranks) as llm:
        yield MemoryEngine(world, llm)


def test_several_pictures_of_any_size(served: MemoryEngine) -> None:
    questions = albums(3, 5) + prompts(2, 9, (64, 32))
    for name in (None, "sqrt", "prior", "other"):
        answers = served.check(questions, [name] * len(questions))
        encoded = served.world.backbone.encode(questions[0].chat_messages, questions[0].images)
        assert answers[0].output.prompt_token_ids == encoded["input_ids"][0].tolist()


def test_videos(served: MemoryEngine) -> None:
    """Three frames, of 48 x 64 pixels."""
    backbone = served.world.backbone
    frames = np.random.default_rng(0).integers(0, 256, (3, 48, 64, 3), dtype=np.uint8)
    text = "<|im_start|>user\n<|vision_start|><|video_pad|><|vision_end|>What moves?<|im_end|>\n<|im_start|>assistant\n"
    inputs = dict(backbone.processor(text=[text], videos=[list(frames)], return_tensors="pt", do_sample_frames=False))
    metadata: dict[str, Any] = {"fps": 2.0, "duration": 1.5, "total_num_frames": 3, "frames_indices": [0, 1, 2]}
    video = frames, {**metadata, "do_sample_frames": False}
    prompt = {"prompt": text, "multi_modal_data": {"video": [video]}}
    for name in (None, "prior", "other"):
        (answer,) = served.offline.generate([prompt], greedy(), memory=name and served.memories[name])
        assert answer.output.prompt_token_ids == inputs["input_ids"][0].tolist()
        tokens, found = served_logprobs(answer.output.outputs[0])
        if name is None:
            expected = score(backbone, [inputs], [tokens])[0]
        else:
            expected = reference_logprobs(backbone, served.bundles[name], inputs, tokens)
        torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCE)
