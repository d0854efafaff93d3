"""Text-only models: prompts without pictures, extraction, activations, and data that does not fit."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Gemma2Config, GptOssConfig, PreTrainedTokenizerFast

from inducekv_vllm.backbone.chat import takes_parts
from inducekv_vllm.bundle.activation import ACTIVATIONS, first_active_position
from inducekv_vllm.errors import TaskDataError
from selector.backbone.extraction import extract
from selector.backbone.generation import answer_logprobs
from selector.backbone.model import Backbone
from selector.backbone.scoring import Scorer
from selector.data.examples import Example, read_task
from tests.task_data import record, write_task
from tests.tiny_families import PICTURE_FAMILIES, TEXT_FAMILIES, TEXT_SIZES, save_gemma3, save_gemma4, save_text
from tests.unit.selector.backbone.memories import decoupled_memory, losses_of_whole

QUESTIONS = ("What colour is the circle?", "How many squares are there? Answer with one word.", "yes no 1 2 3")
PARTS = "{% for message in messages %}{% for part in message['content'] %}{{ part['text'] }}{% endfor %}{% endfor %}"


# Those that tails are computed for; of others a tail is not the whole prompt, and whole prompts are used.
@pytest.fixture(scope="module", params=["llama", "qwen3", "qwen3-moe", "phi3", "gemma", "smollm3", "olmo2"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Backbone:
    return Backbone.load(TEXT_FAMILIES[request.param](tmp_path_factory.mktemp(request.param)))


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> list[Example]:
    """Some with plain strings as content, some with parts."""
    contents = [text if row % 2 else [{"type": "text", "text": text}] for row, text in enumerate(QUESTIONS)]
    lines = [record(row, messages=[{"role": "user", "content": each}]) for row, each in enumerate(contents)]
    return read_task(write_task(tmp_path_factory.mktemp("texts"), lines, num_pictures=1))


def test_without_memory_it_is_the_plain_model(model: Backbone, texts: list[Example]) -> None:
    plain = AutoModelForCausalLM.from_pretrained(model.model.config.name_or_path, dtype=torch.float32)
    batch = model.collate([model.encode_example(example) for example in texts])
    assert torch.equal(model.model(**batch).logits, plain(**batch).logits)
    ours, theirs = (m.generate(**batch, max_new_tokens=4, do_sample=False) for m in (model.model, plain))
    assert torch.equal(ours, theirs)
    assert model.kind == "text"


@pytest.mark.parametrize(
    ("config", "settings"),
    [
        (Gemma2Config, {"query_pre_attn_scalar": 64, "attn_logit_softcapping": 3.0}),
        (GptOssConfig, {"num_local_experts": 2, "num_experts_per_tok": 1}),
    ],
)
def test_soft_caps_and_sinks(config: type[Any], settings: dict[str, Any], texts: list[Example], tmp_path: Path) -> None:
    """Their eager attention; sinks and caps far from what would not show."""
    folder = save_text(tmp_path, config, **TEXT_SIZES, **settings, sliding_window=16)
    backbone = Backbone.load(folder)
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    for model in (plain, backbone.model):
        for number, layer in enumerate(model.model.layers):
            if hasattr(layer.self_attn, "sinks"):
                layer.self_attn.sinks.data = torch.linspace(-2, 2 + number, len(layer.self_attn.sinks))
    batch = backbone.collate([backbone.encode_example(example) for example in texts])
    with torch.no_grad():
        expected, found = (model(**batch).logits for model in (plain, backbone.model))
    real = batch["attention_mask"].bool()
    torch.testing.assert_close(found[real], expected[real], rtol=0, atol=1e-5)


def test_the_prompt_is_the_template_of_a_string(model: Backbone, texts: list[Example]) -> None:
    for example, text in zip(texts, QUESTIONS, strict=True):
        prompt = model.tokenizer.decode(model.encode_example(example)["input_ids"][0])
        assert prompt == f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
    two = [{"role": "user", "content": [{"type": "text", "text": text} for text in ("a", "b")]}]
    prompt = model.tokenizer.decode(model.encode(two, [])["input_ids"][0])
    assert "user\na\nb<|im_end|>" in prompt


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (PARTS, True),
        ("{% for message in messages %}{{ message['content'] }}{% endfor %}", False),
        ("{% for message in messages %}{{ message['content'] | tojson }}{% endfor %}", False),
        ("{% for message in messages %}{{ 'x' + message['content'] }}{% endfor %}", False),
        ("{% for m in messages %}{% if m.content is string %}{{ m.content }}{% endif %}{% endfor %}", False),
        ("{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}" + PARTS + "{% endif %}"
         "{% endfor %}", True),
        ("{{ raise_exception('no such thing') }}", False),
    ],
)  # fmt: skip
def test_templates_that_take_parts(model: Backbone, template: str, expected: bool) -> None:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=model.tokenizer.backend_tokenizer, chat_template=template)
    assert takes_parts(tokenizer) == expected


def test_text_activation_is_that_of_the_whole_prompt(model: Backbone, texts: list[Example]) -> None:
    tokens = model.encode_example(texts[0])["input_ids"][0].tolist()
    assert [first_active_position(each, tokens, ()) for each in ACTIVATIONS] == [0, 0, len(tokens) - 1]
    scorer, memory = Scorer(model), decoupled_memory(model)
    keys = torch.cat([model.retrieval_keys(scorer.prefix(example)) for example in texts])
    losses: dict[str, Tensor] = {}
    for activation in ACTIVATIONS:
        first_active = scorer.first_active(texts, [activation] * len(texts))
        terms = replace(memory.terms(keys), first_active=first_active)
        losses[activation] = scorer.losses(texts, memory, terms)
        whole = losses_of_whole(scorer, texts, memory, terms)
        torch.testing.assert_close(losses[activation], whole, rtol=0, atol=1e-4)
    assert torch.equal(losses["prompt"], losses["text"])
    assert (losses["prompt"] - losses["generation"]).abs().max() > 1e-2
    assert set(scorer.exact_tails.values()) == {True}


def test_pictures_are_refused_with_the_examples_name(model: Backbone, examples: list[Example]) -> None:
    with pytest.raises(TaskDataError, match=r"example 'e0' of task 'colours': \w+ForCausalLM is a text-only model"):
        model.encode_example(examples[0])


@pytest.mark.parametrize("family", ["llava-1.5", "llava-onevision", "qwen2.5-vl", "internvl"])
def test_multimodal_models_train_on_pictures_and_on_text(
    family: str, tmp_path: Path, texts: list[Example], examples: list[Example]
) -> None:
    """In one batch too; the decoder's layers one by one, where that is exact, give what the model gives."""
    backbone = Backbone.load(PICTURE_FAMILIES[family](tmp_path))
    scorer, mixed = Scorer(backbone), [replace(texts[0], id="text"), *examples[:2]]
    prompts, answers = [scorer.prefix(e) for e in mixed], [scorer.answer_tokens(e) for e in mixed]
    alone = [float(scorer.losses([example])) for example in mixed]
    whole = scorer.losses_of(mixed, answer_logprobs(backbone, prompts, answers))
    torch.testing.assert_close(torch.tensor(alone), whole, rtol=0, atol=2e-4)
    result = extract(backbone, mixed, 3, batch_size=3)
    for number, prompt in enumerate(prompts):
        torch.testing.assert_close(result.keys[number], backbone.retrieval_keys(prompt)[0], rtol=0, atol=1e-5)


@pytest.mark.parametrize("save", [save_gemma3, partial(save_gemma4, use_bidirectional_attention="vision")])
def test_pictures_whose_tokens_see_each_other_are_refused(save: Callable[[Path], Path], tmp_path: Path) -> None:
    """Gemma 3, and Gemma 4's larger models: text alone is taught."""
    backbone = Backbone.load(save(tmp_path / "model"))
    lines = [record(0, messages=[{"role": "user", "content": "How many?"}]), record(1)]
    text, picture = read_task(write_task(tmp_path, lines, num_pictures=2))
    assert len(backbone.encode_example(text)["input_ids"][0]) > 4
    with pytest.raises(TaskDataError, match=r"the tokens of a picture see each other in Gemma[34]For"):
        backbone.encode_example(picture)
