"""A sentence encoder for facts: its vectors are those of transformers, computed once, and what is none is refused."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModel, AutoTokenizer, BertModel, T5Config

from inducekv_vllm.backbone import meaning
from inducekv_vllm.backbone.meaning import AT_ONCE, MeaningIndex, SentenceEncoder
from inducekv_vllm.backbone.stored_facts import MOST_JUDGED, StoredQuestions
from inducekv_vllm.errors import UnsupportedModel
from inducekv_vllm.teaching import fact_of
from tests.tiny_encoders import save_classifier

TEXTS = [f"what is the code{' of a town' * number}" for number in range(AT_ONCE - 1)] + ["how tall", "lima ?", "oslo"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_classifier(tmp_path / "encoder", 1, BertModel)


def expected(folder: Path, text: str) -> np.ndarray:
    model, tokenizer = AutoModel.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        mean = model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0].mean(0).numpy()
    return mean / np.linalg.norm(mean)


def test_vectors_are_the_mean_of_the_last_hidden_states(folder: Path) -> None:
    vectors = SentenceEncoder(str(folder)).vectors(TEXTS)
    np.testing.assert_allclose(vectors, [expected(folder, text) for text in TEXTS], atol=1e-5)


def test_one_more_question_costs_one_more_vector(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    encoder, encoded = SentenceEncoder(str(folder)), list[str]()
    original = encoder._encoded
    monkeypatch.setattr(encoder, "_encoded", lambda texts: [encoded.extend(texts), original(texts)][1])
    MeaningIndex(encoder, TEXTS)
    index = MeaningIndex(encoder, [*TEXTS, "has oslo a code"])
    assert encoded == [*TEXTS, "has oslo a code"]
    assert index.nearest("lima ?")[0] == TEXTS.index("lima ?")


def test_those_that_are_not_like_it_are_left_out(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index = MeaningIndex(SentenceEncoder(str(folder)), TEXTS)
    likeness = {at: float(expected(folder, each) @ expected(folder, "ana")) for at, each in enumerate(TEXTS)}
    limit = sorted(likeness.values())[4] + 1e-4
    monkeypatch.setattr(meaning, "LIKE", limit)
    nearest = sorted((at for at in likeness if likeness[at] >= limit), key=lambda at: -likeness[at])
    assert index.nearest("ana") == nearest
    assert len(nearest) == len(TEXTS) - 5


def test_candidates_by_words_and_by_meaning() -> None:
    """The nearest by words, then those by meaning; what the rules refuse does not come."""
    asked = ["How do guests get online?", "What is the wifi password?", "Which sauna hours apply?", "Is Ana online?"]
    asked += ["Where do guests eat?", "Where do guests park?"]
    questions = StoredQuestions([fact_of(each, f"answer {number}", id=each) for number, each in enumerate(asked)])
    text = "where can guests leave cars?"
    found = questions.candidates(text, has_media=False)
    by_words = list(found.pairs)
    assert set(by_words) <= {0, 4, 5}
    assert by_words
    joined = questions.joined(found, text, [1, 3, 2])
    assert list(joined.pairs) == [by_words[0], 1, 2]
    assert [pair.stored for pair in joined.pairs.values()][1:] == [asked[1], asked[2]]
    assert list(questions.joined(found, text, []).pairs) == by_words[:MOST_JUDGED]
    alone = questions.candidates("internet access?", has_media=False)
    assert not alone.pairs
    assert list(questions.joined(alone, "internet access?", [1]).pairs) == [1]


def test_what_is_no_encoder_is_refused(tmp_path: Path, folder: Path) -> None:
    T5Config().save_pretrained(tmp_path / "t5")
    with pytest.raises(UnsupportedModel, match=r"t5: expected an encoder of sentences, found t5$"):
        SentenceEncoder(str(tmp_path / "t5"))
    for path in [*folder.glob("tokenizer*"), *folder.glob("*vocab*")]:
        path.unlink()
    with pytest.raises(UnsupportedModel, match="encoder: the model has no tokenizer"):
        SentenceEncoder(str(folder))
    with pytest.raises(UnsupportedModel, match="/none: no such model folder"):
        SentenceEncoder(str(tmp_path / "none"))
