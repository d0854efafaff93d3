"""Retrieval: the pieces of a document that share most words with a question, by TF-IDF."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from sklearn.feature_extraction.text import TfidfVectorizer

RETRIEVED: Final = 2  # pieces


def retriever(pieces: Sequence[str]) -> Callable[[str], str]:
    """What gives the best pieces for a question, in the order of the document."""
    vectorizer = TfidfVectorizer(sublinear_tf=True)
    index = vectorizer.fit_transform(pieces)

    def found(asked: str) -> str:
        scores = (index @ vectorizer.transform([asked]).T).toarray()[:, 0]
        return "\n\n".join(pieces[at] for at in sorted(scores.argsort()[::-1][:RETRIEVED]))

    return found
