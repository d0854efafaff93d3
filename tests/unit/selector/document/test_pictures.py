"""The pictures of a Markdown document are read where they stand in it, as transformers reads them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText

import selector
from inducekv_vllm.errors import TaskDataError, UnsupportedModel
from selector.backbone.generation import score
from selector.backbone.model import Backbone
from selector.document.reading import read_documents
from selector.document.references import ids_of
from selector.document.text import ReadText, Text, joined, read
from tests.gates import small_fits
from tests.tiny_families import save_internvl, save_qwen2_5_vl
from tests.tiny_models import picture, save_tiny_llama, save_tiny_llava, save_tiny_qwen3_vl

LINE = "The {name} valve opens at {bar} bar, and the team of the mill looks after it.\n\n"
MANUAL = LINE.format(name="kestrel", bar=37) + "![The two valves](valves.png)\n\n" + LINE.format(name="plover", bar=52)
SAVERS: dict[str, Callable[[Path], Path]] = {
    "llava": save_tiny_llava,
    "qwen2.5-vl": save_qwen2_5_vl,  # M-RoPE: a picture's tokens have places in three directions
    "internvl": save_internvl,
}


@pytest.fixture(scope="module", params=SAVERS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return SAVERS[request.param](tmp_path_factory.mktemp("model") / request.param)


@pytest.fixture
def manual(tmp_path: Path) -> Path:
    picture(3).save(tmp_path / "valves.png")
    path = tmp_path / "manual.md"
    path.write_text(MANUAL * 2)
    return path


def text_of(backbone: Backbone, manual: Path) -> Text:
    (document,) = read_documents(manual)
    return Text.of(backbone, document)


def test_all_tokens_are_the_document_before_the_request(model: Path, manual: Path) -> None:
    """Transformers' log-probabilities behind text and pictures, in one prompt."""
    backbone = Backbone.load(model)
    text = text_of(backbone, manual)
    assert sum(len(block.pictures) for block in text.blocks) == 2
    memory = joined(read(backbone, text.blocks))
    prompt, answer = (
        backbone.encode([{"role": "user", "content": [{"type": "text", "text": "When?"}]}], []),
        ids_of(backbone, "yes")[:2],
    )
    (ours,) = score(backbone, [prompt], [answer], memory, memory.terms(memory.retrieval_keys))

    blocks = [block.inputs | {"input_ids": block.token_ids[None]} for block in text.blocks]
    ids = torch.cat([*(each["input_ids"] for each in blocks), prompt["input_ids"], torch.tensor([answer])], dim=1)
    others: dict[str, Any] = {
        name: torch.cat([each[name] for each in blocks if name in each])
        for name in ("pixel_values", "image_grid_thw", "image_sizes")
        if any(name in each for each in blocks)
    }
    if "mm_token_type_ids" in blocks[0]:
        kinds = (ids == backbone.model.config.image_token_id).to(blocks[0]["mm_token_type_ids"])
        others["mm_token_type_ids"] = kinds
    plain = AutoModelForImageTextToText.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        logprobs = plain(input_ids=ids, attention_mask=torch.ones_like(ids), **others).logits[0].log_softmax(-1)
    theirs = [logprobs[ids.shape[1] - 3 + at, token] for at, token in enumerate(answer)]
    torch.testing.assert_close(ours, torch.stack(theirs), rtol=0, atol=1e-4)


def test_another_picture_is_another_memory(tmp_path: Path, manual: Path) -> None:
    backbone = Backbone.load(save_tiny_llava(tmp_path / "model"))
    with small_fits():
        first, again = (selector.teach_document(backbone, manual, share=4, precision="float32") for _ in range(2))
        picture(4).save(manual.parent / "valves.png")
        other = selector.teach_document(backbone, manual, share=4, precision="float32")
    keys = [each.bundle.payload_keys for each in (first, again, other)]
    assert torch.equal(keys[0], keys[1])
    assert not torch.allclose(keys[0].float(), keys[2].float(), atol=1e-2)
    assert first.report["documents"]["manual"]["tokens"] == other.report["documents"]["manual"]["tokens"]


def test_what_the_model_says_of_a_picture_asks_about_it(tmp_path: Path, manual: Path) -> None:
    backbone = Backbone.load(save_tiny_llava(tmp_path / "model"))
    turns = ReadText.of(backbone, text_of(backbone, manual)).turns
    assert sum('picture "The two valves"' in turn.asked for turn in turns) == 2
    assert not any("\ufffc" in each for turn in turns for each in turn)


def test_a_model_of_text_reads_the_document_as_it_is(tmp_path: Path, manual: Path) -> None:
    (manual.parent / "valves.png").unlink()
    backbone = Backbone.load(save_tiny_llama(tmp_path / "model"))
    assert "![The two valves](valves.png)" in "\n\n".join(block.text for block in text_of(backbone, manual).blocks)


@pytest.mark.parametrize(
    ("named", "expected"),
    [
        ("none.png", "the document 'manual': the image .*none.png does not exist"),
        ("../valves.png", "the document 'manual': the image '../valves.png' lies outside the folder"),
        ("manual.md", "the document 'manual': .*manual.md: expected a picture"),
    ],
)
def test_a_picture_that_cannot_be_read_is_named(tmp_path: Path, manual: Path, named: str, expected: str) -> None:
    backbone = Backbone.load(save_tiny_llava(tmp_path / "model"))
    manual.write_text(MANUAL.replace("valves.png", named))
    with pytest.raises(TaskDataError, match=expected):
        text_of(backbone, manual)


def test_a_picture_on_the_web_stays_as_it_is_written(tmp_path: Path, manual: Path) -> None:
    backbone = Backbone.load(save_tiny_llava(tmp_path / "model"))
    manual.write_text(2 * MANUAL.replace("valves.png", "https://example.org/valves.png"))
    blocks = text_of(backbone, manual).blocks
    assert not any(block.pictures for block in blocks)
    assert "![The two valves](https://example.org/valves.png)" in blocks[0].text


def test_pictures_in_a_folder_are_no_documents(manual: Path) -> None:
    assert [document.name for document in read_documents(manual.parent)] == ["manual"]


def test_a_chat_template_without_a_place_for_pictures_is_refused(tmp_path: Path, manual: Path) -> None:
    backbone = Backbone.load(save_tiny_llava(tmp_path / "model"))
    template = backbone.processor.chat_template
    backbone.processor.chat_template = template.replace("<image>", "")
    with pytest.raises(TaskDataError, match="no place for a document's pictures"):
        text_of(backbone, manual)


def test_what_stands_for_a_picture_is_no_text(tmp_path: Path, manual: Path) -> None:
    backbone = Backbone.load(save_tiny_llava(tmp_path / "model"))
    manual.write_text(f"{MANUAL * 2} <image>")
    with pytest.raises(TaskDataError, match="'<image>', which stands for a picture"):
        text_of(backbone, manual)


def test_pictures_that_later_layers_see_are_refused(tmp_path: Path, manual: Path) -> None:
    backbone = Backbone.load(save_tiny_qwen3_vl(tmp_path / "model"))
    with pytest.raises(UnsupportedModel, match="deepstack"):
        read(backbone, text_of(backbone, manual).blocks)
