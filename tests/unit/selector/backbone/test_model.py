"""The frozen backbone: prefixes, padding, retrieval keys."""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForImageTextToText

from inducekv_vllm.errors import ConfigError, TaskDataError, UnsupportedModel
from selector.backbone.model import Backbone
from selector.data.examples import Example
from tests.tiny_models import picture


def test_without_memory_it_is_the_plain_model(backbone: Backbone, examples: list[Example]) -> None:
    plain = AutoModelForImageTextToText.from_pretrained(backbone.model.config.name_or_path, dtype=torch.float32)
    batch = backbone.collate([backbone.encode_example(example) for example in examples[:3]])
    assert torch.equal(backbone.model(**batch).logits, plain(**batch).logits)
    ours, theirs = (m.generate(**batch, max_new_tokens=4, do_sample=False) for m in (backbone.model, plain))
    assert torch.equal(ours, theirs)


def test_the_prefix_holds_the_question_and_never_the_answer(backbone: Backbone, examples: list[Example]) -> None:
    inputs = backbone.encode_example(examples[1])
    text = backbone.processor.tokenizer.decode(inputs["input_ids"][0])
    assert "How many squares" in text
    assert text.endswith("<|im_start|>assistant\n")
    assert examples[1].answer not in text
    assert int((inputs["input_ids"] == backbone.model.config.image_token_id).sum()) > 1
    assert inputs["attention_mask"].all()


def test_a_mark_of_a_picture_in_a_text_is_refused(llava: Backbone) -> None:
    content = [{"type": "text", "text": "What does <image> stand for?"}]
    example = Example("a", "a", ({"role": "user", "content": content},), (), "yes", "a")
    with pytest.raises(TaskDataError, match="the text holds '<image>', which stands for a picture"):
        llava.encode_example(example)


def assert_is_mean(key: Tensor, hidden: Tensor) -> None:
    """The key [d] is the normalised mean of hidden states [T, d]."""
    mean = hidden.double().mean(dim=0)
    torch.testing.assert_close(key.double(), mean / mean.norm(), rtol=0, atol=1e-6)


def test_retrieval_key_is_the_normalised_mean_of_the_last_hidden_states(
    backbone: Backbone, examples: list[Example]
) -> None:
    inputs = backbone.encode_example(examples[0])
    key = backbone.retrieval_keys(inputs)
    assert (key.shape, key.dtype) == ((1, backbone.hidden_size), torch.float32)
    assert_is_mean(key[0], backbone.model(**inputs, output_hidden_states=True).hidden_states[-1][0])  # after the norm


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_does_not_change_keys(backbone: Backbone, examples: list[Example], side: str) -> None:
    prompts = [backbone.encode_example(example) for example in examples[:4]]
    assert len({prompt["input_ids"].shape[1] for prompt in prompts}) > 1
    alone = torch.cat([backbone.retrieval_keys(prompt) for prompt in prompts])
    together = backbone.retrieval_keys(backbone.collate(prompts, side=side))  # type: ignore[arg-type]
    torch.testing.assert_close(together, alone, rtol=0, atol=2e-6)


def test_bfloat16_is_summed_in_float32(model_folders: dict[str, Path], examples: list[Example]) -> None:
    backbone = Backbone.load(model_folders["llava"], dtype=torch.bfloat16)
    inputs = backbone.encode_example(examples[0])
    hidden = backbone.hidden_states(inputs)
    assert hidden.dtype == torch.bfloat16
    assert_is_mean(backbone.retrieval_keys(inputs)[0], hidden[0])


def test_messages_and_images_that_do_not_fit(llava: Backbone) -> None:
    messages = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "?"}]}]
    with pytest.raises(TaskDataError, match="1 places for images, found 0"):
        llava.encode(messages, [])
    with pytest.raises(TaskDataError, match="0 places for images, found 1"):
        llava.encode([{"role": "user", "content": [{"type": "text", "text": "?"}]}], [picture(0)])


def test_models_that_cannot_be_used(tmp_path: Path, model_folders: dict[str, Path]) -> None:
    with pytest.raises(UnsupportedModel, match="no such model folder"):
        Backbone.load(tmp_path / "nothing")
    with pytest.raises(ConfigError, match="device"):
        Backbone.load(model_folders["llava"], device="cuda:77")
