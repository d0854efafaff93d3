"""What a gate is compared with: classifiers by scikit-learn, over words or over the model's own states.

All see the same: the tasks' examples, and the everyday requests of the package as what is outside. A score is the
log-odds of a task against the outside, or the difference of the similarities.

Shapes: n texts, C tasks, L layers that are kept, d hidden size.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import cross_val_score
from sklearn.pipeline import FeatureUnion, Pipeline, make_pipeline
from sklearn.preprocessing import StandardScaler

from benchmarks.research.gate.public_sets import PublicBundle
from inducekv_vllm.backbone.meaning import SentenceEncoder
from inducekv_vllm.backbone.turns import message, turn_marks
from inducekv_vllm.gate import deciding_tokens
from selector.backbone.model import Backbone, attention_named
from selector.gate.background import everyday_requests
from selector.gate.fitting_set import REQUESTS

Features = npt.NDArray[np.float32]
EVERY: Final = 3  # layer is kept
BATCH: Final = 16
LONGEST: Final = 1500  # characters of a text
ENCODER: Final = "sentence encoder, logistic regression"


@dataclass(frozen=True)
class Scores:
    """Of a rival, for the texts that it is asked."""

    margins: npt.NDArray[np.float64]  # [n, C], at least 0: open
    seconds: float  # of the fit
    milliseconds: float  # of a decision, without the features of the model


class MeanStates:
    """The mean hidden states [L, d] of a request's own tokens, computed once for each text and kept in a file."""

    def __init__(self, backbone: Backbone, path: Path | None) -> None:
        self._backbone, self._path = backbone, path
        self._known: dict[str, torch.Tensor] = torch.load(path) if path is not None and path.is_file() else {}
        self.layers = tuple(range(0, backbone.num_layers + 1, EVERY))

    def of(self, texts: Sequence[str]) -> Features:
        """[n, L, d]"""
        new = [text for text in dict.fromkeys(texts) if text not in self._known]
        new.sort(key=len)
        for at in range(0, len(new), BATCH):
            self._compute(new[at : at + BATCH])
        if new and self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            torch.save(self._known, self._path)
        return torch.stack([self._known[text] for text in texts]).float().numpy()

    @torch.no_grad()
    def _compute(self, texts: Sequence[str]) -> None:
        backbone = self._backbone
        marks = turn_marks(backbone.processor)
        encoded = [backbone.encode([message("user", text[:LONGEST])], []) for text in texts]
        with attention_named(backbone, "sdpa"):
            found = backbone.model.model(**backbone.collate(encoded), use_cache=False, output_hidden_states=True)
        for row, (text, inputs) in enumerate(zip(texts, encoded, strict=True)):
            own = deciding_tokens(inputs["input_ids"][0].tolist(), marks, ()).text
            means = [found.hidden_states[layer][row, own].mean(dim=0) for layer in self.layers]
            self._known[text] = torch.stack(means).half()


def rival_scores(
    bundle: PublicBundle, asked: Sequence[str], states: MeanStates | None, encoder: SentenceEncoder | None = None
) -> Mapping[str, Scores]:
    """By rival; those that look at the model need its states, one a sentence encoder."""
    outside = [request.text for request in everyday_requests() if not request.picture][:REQUESTS]
    texts = [text for task in bundle.tasks for text in task.train] + outside
    labels = np.array(
        [at for at, task in enumerate(bundle.tasks) for _ in task.train] + [len(bundle.tasks)] * len(outside)
    )
    found = {"TF-IDF, logistic regression": _fitted(_words(), texts, labels, asked)}
    if encoder is not None:
        classifier = LogisticRegression(C=10, max_iter=2000)
        found[ENCODER] = _fitted(classifier, encoder.vectors(texts), labels, encoder.vectors(asked))
    if states is not None:
        fit, test = states.of(texts), states.of(asked)  # [n, L, d]
        found["last layer's mean, nearest"] = _nearest(fit[:, -1], labels, test[:, -1])
        found["last layer's mean, logistic regression"] = _fitted(_states(), fit[:, -1], labels, test[:, -1])
        best = _best_layer(fit, labels)
        found["best layer's mean, logistic regression"] = _fitted(_states(), fit[:, best], labels, test[:, best])
    return found


def _words() -> Pipeline:
    words = TfidfVectorizer(sublinear_tf=True, ngram_range=(1, 2))
    letters = TfidfVectorizer(sublinear_tf=True, analyzer="char_wb", ngram_range=(2, 5))
    return make_pipeline(
        FeatureUnion([("words", words), ("letters", letters)]), LogisticRegression(C=10, max_iter=1000)
    )


def _states() -> Pipeline:
    return make_pipeline(StandardScaler(), LogisticRegression(C=0.1, max_iter=1000))


def _best_layer(fit: Features, labels: npt.NDArray[np.int64]) -> int:
    """By cross-validation on the examples alone."""
    candidates = range(1, fit.shape[1])
    return max(
        candidates, key=lambda at: cross_val_score(_states(), fit[:, at], labels, cv=3, scoring="neg_log_loss").mean()
    )


def _fitted(model: Any, fit: Any, labels: npt.NDArray[np.int64], asked: Any) -> Scores:
    began = time.perf_counter()
    model.fit(fit, labels)
    fitted = time.perf_counter()
    odds = model.predict_log_proba(asked)  # [n, C + 1]
    return Scores(odds[:, :-1] - odds[:, -1:], fitted - began, _each(fitted, len(asked)))


def _nearest(fit: Features, labels: npt.NDArray[np.int64], asked: Features) -> Scores:
    began = time.perf_counter()
    center = fit.mean(axis=0)
    known, new = _unit(fit - center), _unit(asked - center)
    fitted = time.perf_counter()
    similar = new @ known.T  # [n, examples]
    by_class = np.stack([similar[:, labels == label].max(axis=1) for label in range(labels.max() + 1)], axis=1)
    return Scores(by_class[:, :-1] - by_class[:, -1:], fitted - began, _each(fitted, len(asked)))


def _unit(vectors: Features) -> Features:
    norms: Features = np.linalg.norm(vectors, axis=1, keepdims=True)
    return vectors / norms


def _each(began: float, count: int) -> float:
    return 1000 * (time.perf_counter() - began) / count
