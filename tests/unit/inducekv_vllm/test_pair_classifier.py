"""A sequence classifier as a judge: its odds are those of transformers, and what cannot judge is refused."""

import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer, BertModel

from inducekv_vllm.backbone.pair_classifier import AT_ONCE, NOT_READ, PairClassifier
from inducekv_vllm.errors import UnsupportedModel
from inducekv_vllm.judge import Pair
from tests.tiny_encoders import save_classifier

CODE = "What is the code of Lima?"
PAIRS = [Pair(CODE, f"Which code does Lima have{' ?' * marks}") for marks in range(AT_ONCE + 3)]


@pytest.mark.parametrize("outputs", [1, 2])
def test_the_odds_are_those_of_transformers(outputs: int, tmp_path: Path) -> None:
    folder = str(save_classifier(tmp_path / "judge", outputs))
    model, tokenizer = AutoModelForSequenceClassification.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        rows = [model(**tokenizer(*pair, return_tensors="pt")).logits[0].tolist() for pair in PAIRS]
    expected = [row[0] if outputs == 1 else row[1] - row[0] for row in rows]
    assert PairClassifier(folder).said(PAIRS) == pytest.approx(expected, abs=1e-5)
    assert len({round(each, 3) for each in expected}) > 5


@pytest.mark.parametrize("asked", ["Which code has Lima? [SEP] What is the", "Which code has Quito?", "code " * 40])
def test_what_it_cannot_read_is_not_judged(asked: str, tmp_path: Path) -> None:
    judge = PairClassifier(str(save_classifier(tmp_path / "judge", 1)))
    first, second, third = judge.said([PAIRS[0], Pair(CODE, asked), PAIRS[1]])
    assert second == NOT_READ
    assert [first, third] == pytest.approx(judge.said(PAIRS[:2]), abs=1e-5)


def test_what_cannot_judge_is_refused(tmp_path: Path) -> None:
    three = save_classifier(tmp_path / "three", 3)
    with pytest.raises(UnsupportedModel, match=r"three: expected a classifier with one output or two, found 3$"):
        PairClassifier(str(three))
    encoder = save_classifier(tmp_path / "encoder", 1, BertModel)
    expected = r"expected a sequence classifier \(BertForSequenceClassification\), found BertModel$"
    with pytest.raises(UnsupportedModel, match=expected):
        PairClassifier(str(encoder))
    mute = save_classifier(tmp_path / "mute", 1)
    for path in [*mute.glob("tokenizer*"), *mute.glob("*vocab*")]:
        path.unlink()
    with pytest.raises(UnsupportedModel, match="mute: the model has no tokenizer"):
        PairClassifier(str(mute))
    with pytest.raises(UnsupportedModel, match="/none: no such model folder"):
        PairClassifier(str(tmp_path / "none"))


def test_a_folder_that_changes_before_it_is_loaded(tmp_path: Path) -> None:
    folder = save_classifier(tmp_path / "judge", 1)
    judge = PairClassifier(str(folder))
    shutil.copytree(save_classifier(tmp_path / "encoder", 1, BertModel), tmp_path / "judge", dirs_exist_ok=True)
    with pytest.raises(UnsupportedModel, match="found BertModel"):
        judge.said(PAIRS)
    (folder / "config.json").write_bytes((save_classifier(tmp_path / "other", 1) / "config.json").read_bytes())
    with pytest.raises(UnsupportedModel, match="judge: cannot load the classifier: its weights lack classifier"):
        judge.said(PAIRS)
