"""The demo model: tokens and pixels are those of its training, and the committed checkpoint answers."""

import numpy as np
import pytest
import torch
from safetensors import safe_open
from transformers import AutoProcessor, AutoTokenizer

from benchmarks.demo import model as m
from benchmarks.demo import packing, train, world
from benchmarks.demo.evaluate import Answerer, accuracy
from server.demo import CHECKPOINT


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(CHECKPOINT)


@pytest.fixture(scope="module")
def answerer():
    return Answerer(CHECKPOINT)


def test_the_committed_tokenizer_is_the_one_training_builds(tokenizer):
    assert train.build_demo_tokenizer().get_vocab() == tokenizer.get_vocab()


def test_processor_makes_the_pixels_and_tokens_training_used(tokenizer):
    record, pixels = next(world.examples("base", "test", 1))
    processor = AutoProcessor.from_pretrained(CHECKPOINT)
    prompt = tokenizer.apply_chat_template(record["messages"], tokenize=False, add_generation_prompt=True)
    inputs = processor(images=[pixels], text=[prompt], return_tensors="pt")
    torch.testing.assert_close(inputs["pixel_values"], packing.normalise([pixels]), atol=1e-6, rtol=0)
    assert inputs["input_ids"][0, : len(packing.PREFIX)].tolist() == packing.PREFIX
    assert (inputs["input_ids"] == m.IMAGE).sum() == m.IMAGE_TOKENS


# The committed checkpoint.


def test_checkpoint_is_small_and_has_published_names():
    path = CHECKPOINT / "model.safetensors"
    assert path.stat().st_size <= 16 * 2**20
    with safe_open(path, "pt") as file:
        names = set(file.keys())
    prefixes = ("vision_tower.vision_model.", "multi_modal_projector.", "language_model.model.")
    assert all(name.startswith(prefixes) for name in names)
    assert names == {m.published_name(name) for name in m.build_model(0).state_dict()} - {None}


def test_checkpoint_answers_held_out_base_questions(answerer):
    scored = accuracy(answerer, list(world.examples("base", "test", 90)))
    assert np.mean([right for _, right in scored]) >= 0.9
