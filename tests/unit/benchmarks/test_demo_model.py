"""The demo model: packed training equals single prompts, the export is complete, the committed checkpoint answers."""

import json

import numpy as np
import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForImageTextToText, AutoProcessor, AutoTokenizer

from benchmarks.demo import model as m
from benchmarks.demo import packing, questions, stages, train, world
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


def test_a_packed_question_sees_what_its_own_prompt_would_show(tokenizer):
    model = m.build_model(0).eval()
    weights = dict.fromkeys(questions.FAMILIES, 1.0)
    batch = packing.make_batch(tokenizer, np.random.default_rng(0), "train", weights, separate=1)
    with torch.no_grad():
        packed = stages.answer_logits(model, batch)[0].split([length for _, length in batch.spans])
        row, starts = batch.tokens[0], (batch.positions[0] == len(packing.PREFIX)).nonzero().flatten().tolist()
        assert len(starts) == len(batch.spans) > 3
        for start, logits in zip(starts, packed, strict=True):
            end = start + (row[start:] == m.END).nonzero()[0].item()
            prompt = torch.cat([row[: len(packing.PREFIX)], row[start:end]])
            alone = model(input_ids=prompt[None], pixel_values=batch.pixels).logits[0, -len(logits) :]
            torch.testing.assert_close(alone, logits, atol=1e-5, rtol=1e-5)


@pytest.mark.slow
def test_training_and_resuming_export_a_checkpoint_that_loads(tokenizer, tmp_path, monkeypatch):
    command = ["train", "--work", str(tmp_path), "--output", str(tmp_path / "out"), "--warm-up-steps", "1"]
    command += ["--no-compile", "--threads", "1", "--check-every", "1"]
    monkeypatch.setattr(train, "ROWS", {"separate": 1, "conversations": 1, "exemplars": 1})
    monkeypatch.setattr(train, "build_demo_tokenizer", lambda: tokenizer)  # another test builds it
    evaluate = train.evaluate_packed
    monkeypatch.setattr(train, "evaluate_packed", lambda *given, seed: evaluate(*given[:2], rows=32, seed=seed))
    for steps in ("1", "2"):
        monkeypatch.setattr("sys.argv", [*command, "--steps", steps])
        train.main()
    records = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert any(r.get("resumed_at") == 1 for r in records)
    loaded, info = AutoModelForImageTextToText.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values())
    trained = torch.load(tmp_path / "state.pt", weights_only=True)["model"]
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(tensor, trained[name].to(torch.float16).float()), name


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
