"""The marks of a chat template's user turns, and the tokens that decide by them."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from inducekv_vllm.backbone.placeholders import placeholder_ids
from inducekv_vllm.backbone.turns import message, turn_marks
from inducekv_vllm.gate import deciding_tokens, turn_starts
from selector.backbone.model import Backbone
from selector.data.examples import Example
from server.demo import CHECKPOINT
from tests.tiny_models import byte_tokenizer

LLAMA_3 = """{{ '<|begin_of_text|>' }}{% for message in messages %}{{ '<|start_header_id|>' + message['role'] + \
'<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' }}{% endfor %}{% if add_generation_prompt %}\
{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"""
LLAMA_3_TOKENS = ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
# Its turns are marked by plain words, and it takes no system prompt.
VICUNA = """{% for message in messages %}{% if message['role'] == 'system' %}{{ raise_exception('no system prompt') }}\
{% elif message['role'] == 'user' %}{{ 'USER: ' + message['content'] }}{% else %}\
{{ ' ASSISTANT: ' + message['content'] + '<|im_end|>' }}{% endif %}{% endfor %}\
{% if add_generation_prompt %}{{ ' ASSISTANT:' }}{% endif %}"""


def with_template(backbone: Backbone, template: str, tokens: list[str]) -> Backbone:
    """The backbone with another tokenizer; only its ids are looked at."""
    tokenizer: Any = PreTrainedTokenizerFast(
        tokenizer_object=byte_tokenizer(tokens, template).backend_tokenizer,
        eos_token="<|im_end|>",
        extra_special_tokens=tokens,
        chat_template=template,
    )
    return replace(backbone, processor=tokenizer)


def ids(backbone: Backbone, text: str) -> list[int]:
    return list(backbone.tokenizer(text, add_special_tokens=False)["input_ids"])


def deciding_text(backbone: Backbone, messages: list[dict[str, Any]]) -> str:
    tokens = ids(backbone, backbone.chat_text(messages, generation_prompt=True))
    chosen, _ = deciding_tokens(tokens, turn_marks(backbone.processor), ())
    return str(backbone.tokenizer.decode([tokens[at] for at in chosen])).strip()


CONVERSATION = [message("user", "Hello there"), message("assistant", "Yes"), message("user", "Which circle?")]


def test_llama_3(llava: Backbone) -> None:
    backbone = with_template(llava, LLAMA_3, LLAMA_3_TOKENS)
    marks = turn_marks(backbone.processor)
    assert list(marks.begin) == ids(backbone, "<|start_header_id|>user<|end_header_id|>")
    assert [marks.end] == ids(backbone, "<|eot_id|>")
    for messages in (CONVERSATION, [message("system", "Be brief."), *CONVERSATION], CONVERSATION[2:]):
        assert deciding_text(backbone, messages) == "Which circle?"


def test_a_template_that_marks_turns_by_words(llava: Backbone) -> None:
    backbone = with_template(llava, VICUNA, [])
    marks = turn_marks(backbone.processor)
    assert backbone.tokenizer.decode(marks.begin).strip().endswith("USER:")
    assert marks.end is None  # what follows is a word, which a question may have too
    for messages in (CONVERSATION, CONVERSATION[2:]):
        assert deciding_text(backbone, messages) == "Which circle? ASSISTANT:"


def test_tiny_models(backbone: Backbone, examples: list[Example]) -> None:
    """What decides is the picture and the question, after whatever stands before."""
    marks = turn_marks(backbone.processor)
    assert ids(backbone, "<|im_start|>user")[0] == marks.begin[0]
    assert [marks.end] == ids(backbone, "<|im_end|>")
    example, placeholders = examples[1], placeholder_ids(backbone.model.config)
    earlier = [message("system", "Be brief."), message("user", "Hello there"), message("assistant", "Yes")]
    question = example.messages[0]["content"][-1]["text"]
    texts = []
    for messages in (list(example.messages), [*earlier, *example.messages]):
        tokens = backbone.encode(messages, example.load_images())["input_ids"][0].tolist()
        text, media = deciding_tokens(tokens, marks, placeholders)
        assert media == [at for at, token in enumerate(tokens) if token in placeholders] != []
        texts.append(backbone.tokenizer.decode([tokens[at] for at in text]))
    assert texts[0] == texts[1]
    assert question in texts[0]
    assert "Hello" not in texts[0]


@pytest.mark.parametrize("model", [CHECKPOINT], ids=["demo"])
def test_the_demo_model(model: Path) -> None:
    backbone = Backbone.load(model)
    marks = turn_marks(backbone.processor)
    assert marks.begin
    tokens = ids(backbone, backbone.chat_text(CONVERSATION, generation_prompt=True))
    assert len(turn_starts(tokens, marks)) == 2
    assert deciding_text(backbone, CONVERSATION) == "Which circle?"
