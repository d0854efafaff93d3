"""DeepSeek-VL2 in vLLM, which has its own: tiles of pictures, the chat template, two ranks of tensor parallelism."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from PIL import Image
from vllm.transformers_utils.chat_templates import get_chat_template_fallback_path
from vllm.transformers_utils.processors.deepseek_vl2 import DeepseekVLV2Processor as ServedProcessor

from inducekv_vllm.models.deepseek_vl2_config import CHAT_TEMPLATE
from tests.engine.albums import albums
from tests.engine.parity import FEWER_PROCESSES, MemoryEngine, World, engine, make_world, prompts, text_prompts
from tests.engine.small_towers import SmallTowersWorker
from tests.tiny_families import save_deepseek_vl2, small_timm

OPTIONS = {"enforce_eager": True, "max_num_batched_tokens": 64, "block_size": 32, "limit_mm_per_prompt": {"image": 3}}
TWO_RANKS = {
    "tensor_parallel_size": 2,
    "worker_cls": f"{SmallTowersWorker.__module__}.{SmallTowersWorker.__name__}",
}
CONVERSATION = [
    {"role": "system", "content": "Be brief. "},
    {"role": "user", "content": "<image>\nWhat is it?"},
    {"role": "assistant", "content": "A ring."},
    {"role": "user", "content": "Its colour?"},
]
# Width and height in pixels.
SIZES = ((56, 56), (300, 40), (40, 300), (57, 113), (112, 56), (500, 499), (1, 7), (168, 56))


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("deepseek-vl2")
    with small_timm():
        made = make_world(save_deepseek_vl2(folder / "model"), folder, with_merged=True)
        yield made


@pytest.mark.slow  # as most families are
@pytest.mark.parametrize("ranks", [1, 2])
def test_one_to_three_pictures_of_any_size(world: World, ranks: int) -> None:
    """A prompt with more than two has one tile of each."""
    environment = FEWER_PROCESSES if ranks == 1 else {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}
    more = {} if ranks == 1 else TWO_RANKS
    with engine(world.model, environment=environment, **OPTIONS, **more) as llm:
        served = MemoryEngine(world, llm)
        questions = [
            *text_prompts(1, 3),
            *albums(2, 5, 1),
            *albums(2, 6, 2),
            *albums(2, 7, 3),
            *prompts(1, 9, (200, 30)),
        ]
        for name in (None, "sqrt", "prior", "other"):
            answers = served.check(questions, [name] * len(questions))
            for question, answer in zip(questions, answers, strict=True):
                encoded = world.backbone.encode(question.chat_messages, question.images)
                assert answer.output.prompt_token_ids == encoded["input_ids"][0].tolist()


def test_a_prompt_is_cut_and_counted_as_vllm_does(world: World) -> None:
    ours = world.backbone.processor
    theirs = ServedProcessor.from_pretrained(str(world.model))
    random = np.random.default_rng(0)
    pictures = [Image.fromarray(random.integers(0, 256, (height, width, 3), dtype=np.uint8)) for width, height in SIZES]
    for group in (
        ([each] for each in pictures),
        (pictures[n : n + 2] for n in (0, 2, 4)),
        (pictures[n : n + 3] for n in (0, 4)),
    ):
        for images in group:
            text = "".join("<image>look " for _ in images)
            found, expected = ours(images=images, text=[text]), theirs(text=text, images=images)
            assert found["input_ids"][0].tolist() == expected["input_ids"][0].tolist()[1:]  # theirs begins a text
            columns_and_rows = expected["images_spatial_crop"]
            assert torch.equal(found["num_local_patches"], columns_and_rows)
            tiles = iter(
                expected["pixel_values"].split([count for of in columns_and_rows.prod(1).tolist() for count in (1, of)])
            )
            views = list(tiles)
            torch.testing.assert_close(found["pixel_values"], torch.cat(views[::2]), rtol=0, atol=1e-6)
            torch.testing.assert_close(found["pixel_values_local"], torch.cat(views[1::2]), rtol=0, atol=1e-6)


@pytest.mark.parametrize("messages", [CONVERSATION, CONVERSATION[1:], CONVERSATION[1:2]])
@pytest.mark.parametrize("generation_prompt", [True, False])
def test_the_chat_template_is_vllms(world: World, messages: list[dict[str, str]], generation_prompt: bool) -> None:
    path = get_chat_template_fallback_path("deepseek_vl_v2", "")
    assert path is not None
    tokenizer = world.backbone.tokenizer
    ours, theirs = (
        tokenizer.apply_chat_template(
            messages, chat_template=template, add_generation_prompt=generation_prompt, tokenize=False
        )
        for template in (CHAT_TEMPLATE, path.read_text())
    )
    assert ours == theirs
