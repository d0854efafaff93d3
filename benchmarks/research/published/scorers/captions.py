"""Captions: BLEU, METEOR, ROUGE-L and CIDEr of pycocoevalcap, as UCIT's scripts call them, and SMoLoRA's.

METEOR and the tokeniser of the published stack are Java programs that the package holds. Without Java METEOR is absent,
and the texts are split by `split_without_java`, which is near to that tokeniser and not the same.
"""

from __future__ import annotations

import re
import shutil
import statistics
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from inducekv_vllm.errors import TaskDataError

from .scored import Prediction, Question, Rule, Score, by_id

Texts = dict[int, list[str]]  # of each picture
DROPPED = frozenset("'\"`.?!,:;-")
BRACKETS = {"(": "-lrb-", ")": "-rrb-", "{": "-lcb-", "}": "-rcb-"}
_TOKEN = re.compile(r"\w+(?:['-]\w+)*|[^\w\s]")
ROUGE_BETA = 1.2


def has_java() -> bool:
    return shutil.which("java") is not None


def split_without_java(text: str) -> str:
    """In lower case, without marks of punctuation but brackets, which have names."""
    return " ".join(BRACKETS.get(token, token) for token in _TOKEN.findall(text.lower()) if token not in DROPPED)


def tokenised(texts: Texts) -> Texts:
    """By Stanford's tokeniser, in lower case, without 17 marks of punctuation."""
    if not has_java():
        return {key: [split_without_java(text) for text in of] for key, of in texts.items()}
    from pycocoevalcap.tokenizer.ptbtokenizer import PTBTokenizer

    found: Texts = PTBTokenizer().tokenize({key: [{"caption": text} for text in of] for key, of in texts.items()})
    return found


def measures(references: Texts, captions: Texts) -> dict[str, tuple[float, list[float]]]:
    """Of tokenised texts, with the value of each picture, in the order of `references`."""
    from pycocoevalcap.bleu.bleu import Bleu
    from pycocoevalcap.cider.cider import Cider
    from pycocoevalcap.meteor.meteor import Meteor
    from pycocoevalcap.rouge.rouge import Rouge

    found: dict[str, tuple[float, list[float]]] = {}
    bleu, each = Bleu(4).compute_score(references, captions, verbose=0)
    found |= {f"Bleu_{n}": (bleu[n - 1], list(each[n - 1])) for n in range(1, 5)}
    if has_java():
        found["METEOR"] = Meteor().compute_score(references, captions)
    for name, scorer in (("ROUGE_L", Rouge()), ("CIDEr", Cider())):
        total, values = scorer.compute_score(references, captions)
        found[name] = float(total), [float(value) for value in values]
    return found


def rouge_of_one_reference(caption: str, references: Sequence[str]) -> float:
    """ROUGE-L with the precision and recall of the same reference: the best over the references."""
    from pycocoevalcap.rouge.rouge import my_lcs

    words, best = caption.split(), 0.0
    for reference in references:
        of = reference.split()
        shared = my_lcs(of, words)
        if shared:
            p, r = shared / len(words), shared / len(of)
            best = max(best, (1 + ROUGE_BETA**2) * p * r / (r + ROUGE_BETA**2 * p))
    return best


def _by_line(questions: Sequence[Question], predictions: Sequence[Prediction]) -> list[str]:
    if len(predictions) < len(questions):
        raise TaskDataError(f"expected {len(questions)} captions, one a line, found {len(predictions)}")
    return [prediction.text for prediction in predictions[: len(questions)]]


def _captions(questions: Sequence[Question], predictions: Sequence[Prediction], *, published: bool) -> Score:
    if not questions:
        return Score({}, (), 0)
    texts = by_id(predictions)
    captions = _by_line(questions, predictions) if published else [texts.get(each.id, "") for each in questions]
    references = tokenised({at: list(question.answers) for at, question in enumerate(questions)})
    written = tokenised({at: [caption.replace("\n", " ")] for at, caption in enumerate(captions)})
    found = measures(references, written)
    if not published:
        values = [rouge_of_one_reference(written[at][0], references[at]) for at in range(len(questions))]
        found["ROUGE_L"] = statistics.fmean(values), values
    metrics = {name: 100 * total for name, (total, _) in found.items()}
    if published:
        metrics = {"average": statistics.fmean(metrics.values()), **metrics}
    else:  # CIDEr has no upper bound, and BLEU is one measure, not four
        metrics = {"cider": metrics["CIDEr"], **metrics}
    return Score(metrics, tuple(found["CIDEr"][1]), len(questions))


CAPTIONS = Rule(
    partial(_captions, published=True),
    partial(_captions, published=False),
    (
        "HiDe-LLaVA eval_caption: captions are numbered by line: a missing one shifts all after it",
        "the average is over seven measures, four of them BLEU, with CIDEr, which has no upper bound",
        "ROUGE-L takes its precision and its recall from different references",
        "the number printed is that of the predictions, not of the pictures",
        "pycocoevalcap's tokeniser makes brackets words (-lrb-): its list of dropped marks has them in capitals",
    ),
    (
        "captions are found by question_id; a missing one is empty",
        "the measures stand alone; the first is CIDEr",
        "ROUGE-L is that of the best single reference",
    ),
)


def _cider(references: Texts, captions: Texts) -> tuple[float, list[float]]:
    from pycocoevalcap.cider.cider import Cider

    total, each = Cider().compute_score(references, captions)
    return float(total), [float(value) for value in each]


def _smolora(questions: Sequence[Question], predictions: Sequence[Prediction]) -> Score:
    texts = by_id(predictions)
    asked = [question for question in questions if question.id in texts]
    references = tokenised({at: list(question.answers) for at, question in enumerate(asked)})
    captions = tokenised({at: [texts[question.id]] for at, question in enumerate(asked)})
    kept = {at: [_nearest(captions[at][0], of)] for at, of in references.items()}
    total, values = _cider(captions, kept) if asked else (0.0, [])  # exchanged
    found = dict(zip((question.id for question in asked), values, strict=True))
    return Score({"cider": 100 * total}, tuple(found.get(question.id) for question in questions), len(asked))


def _nearest(caption: str, references: list[str]) -> str:
    """The reference with the best CIDEr, whose document frequencies are this picture's references'."""
    alone: Mapping[int, Any] = dict(enumerate([reference] for reference in references))
    _, values = _cider(dict(alone), {at: [caption] for at in alone})
    return references[max(range(len(references)), key=values.__getitem__)]


SMOLORA = Rule(
    _smolora,
    CAPTIONS.corrected,
    (
        "SMoLoRA eval_flickr30k_cider: of the references only the one with the best CIDEr is kept",
        "the last CIDEr is called with predictions and references exchanged",
    ),
    CAPTIONS.differences,
)


def follows_instruction(text: str) -> bool:
    """SMoLoRA's instruction-following of captions: a final period and more than four words."""
    return text.strip().endswith(".") and len(text.split()) > 4
