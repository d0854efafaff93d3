"""The demo model: packed training equals single prompts, the export is complete, the committed checkpoint answers."""

import json

import numpy as np
import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForImageTextToText, AutoProcessor, AutoTokenizer

from benchmarks.chat import normalise_answer, same_answer
from benchmarks.demo import model as m
from benchmarks.demo import packing, questions, stages, streams, train, world
from benchmarks.demo.evaluate import Answerer, accuracy
from selector.refined.muon import Muon
from server.demo import CHECKPOINT


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(CHECKPOINT)


@pytest.fixture(scope="module")
def answerer():
    return Answerer(CHECKPOINT)


def test_architecture():
    config = m.build_config()
    text = config.text_config
    assert sum(p.numel() for p in m.build_model(0).parameters()) <= 8_000_000
    assert text.head_dim == 64
    assert text.num_attention_heads > text.num_key_value_heads
    assert text.max_position_embeddings >= 2048


@pytest.mark.parametrize(
    "text", ["What colour is the circle?", "zorp=blick", "é漢 🙂\n\t\0", " two  spaces ", "\N{BOM}x"]
)
def test_tokenizer_round_trips_any_text(tokenizer, text):
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(ids) == text
    assert max(ids) < m.VOCABULARY


def test_every_word_of_the_world_is_one_token(tokenizer):
    forms = [form for word in questions.COPY_WORDS for form in (word, " " + word)]
    assert {len(ids) for ids in tokenizer(forms, add_special_tokens=False)["input_ids"]} == {1}


def test_the_committed_tokenizer_is_the_one_training_builds(tokenizer):
    assert train.build_demo_tokenizer().get_vocab() == tokenizer.get_vocab()


def test_chat_template(tokenizer):
    content = [{"type": "image_url", "image_url": {"url": "a.png"}}, {"type": "text", "text": "Where?"}]
    turns = [{"role": "user", "content": content}, {"role": "assistant", "content": "left"}]
    assert tokenizer.apply_chat_template(turns[:1], tokenize=False, add_generation_prompt=True) == (
        "<|user|><image>Where?<|assistant|>"
    )
    assert tokenizer.apply_chat_template([*turns, {"role": "user", "content": "Why?"}], tokenize=False) == (
        "<|user|><image>Where?<|assistant|>left<|end|><|user|>Why?"
    )


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


def test_batches_of_every_kind_hold_their_pictures_and_answers(tokenizer):
    batch = packing.make_batch(tokenizer, np.random.default_rng(0), "train", train.WEIGHTS, **train.ROWS)
    assert (batch.tokens == m.IMAGE).sum() == len(batch.pixels) * m.IMAGE_TOKENS
    assert (batch.targets >= 0).sum() == sum(length for _, length in batch.spans)
    marked = batch.targets[:, :-1] >= 0
    assert (batch.tokens[:, 1:][marked] == batch.targets[:, :-1][marked]).all()
    assert {family for family, _ in batch.spans} == set(questions.FAMILIES)


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


def test_only_the_reduced_precision_takes_torchs_muon():
    parameters = {
        "layer.weight": torch.nn.Parameter(torch.ones(4, 4)),
        "norm.weight": torch.nn.Parameter(torch.ones(4)),
    }
    for reduced in (False, True):
        muon, adamw = stages.make_optimizers(parameters, 2e-3, 1e-3, reduced)
        assert isinstance(muon, torch.optim.Muon if reduced else Muon)
        assert [muon.defaults[name] for name in ("lr", "momentum", "weight_decay")] == [2e-3, 0.95, 0.02]
        assert [len(adamw.param_groups[0]["params"]), adamw.defaults["lr"]] == [1, 1e-3]


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


def test_frozen_model_does_not_know_the_code_words(answerer):
    for task in ("guild", "code_shape", "code_digit"):
        scored = accuracy(answerer, list(world.examples(task, "test", 24)))
        assert np.mean([right for _, right in scored]) <= 0.34


def test_frozen_image_tokens_tell_digits_apart(answerer):
    """The digit tasks can be learnt with the vision tower as it is: a ridge classifier on its tokens reads digits."""

    def read(split, number):
        digits = [streams.Digit(index, 0, 0) for index in streams.digit_indices(split)[:number]]
        pixels = packing.normalise([streams.render_digit(d) for d in digits])
        with torch.no_grad():
            features = stages.image_features(answerer.model, pixels).flatten(1).double()
        return features, torch.tensor([d.value for d in digits])

    (seen, labels), (unseen, wanted) = read("train", 600), read("test", 200)
    mean = seen.mean(0)
    kernel = (seen - mean) @ (seen - mean).T
    ridge = 1e-2 * kernel.diagonal().mean() * torch.eye(len(kernel), dtype=torch.float64)
    weights = torch.linalg.solve(kernel + ridge, torch.nn.functional.one_hot(labels).double())
    answers = ((unseen - mean) @ (seen - mean).T @ weights).argmax(-1)
    assert (answers == wanted).double().mean() > 0.9


def test_answers_are_compared_without_case_space_and_final_stop():
    assert normalise_answer(" Red. ") == "red"
    assert same_answer(" Zorp.\n", "zorp")
    assert not same_answer("zorp blick", "zorp")
    assert not same_answer("The circle is red.", "red")
