"""VQACL: the ten question types of VQAv2 with soft labels and ten references, and NExT-QA's open answers."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.research.published.rows import collected, read_rows, read_table, text_of
from benchmarks.research.published.scorers import vqa_text
from benchmarks.research.published.scorers.next_qa import next_qa
from benchmarks.research.published.scorers.scored import Question
from inducekv_vllm.errors import TaskDataError

from .layout import Files, PublishedSuite, Task
from .llava import TYPES

ANNOTATIONS = ("v2_mscoco_val2014_annotations.json", "v2_mscoco_train2014_annotations.json")
NEXT_TYPES = ("CW", "TN", "TC", "DL", "DB", "DC", "DO", "CH")
MORE_ANSWERS = "add_reference_answer_test.json"


def _annotated(files: Files) -> dict[str, tuple[str, ...]]:
    """The ten answers to each question of VQAv2's annotations, as far as they are there."""
    answers: dict[str, tuple[str, ...]] = {}
    for name in ANNOTATIONS:
        if files.has(name):
            table = read_table(files.find(name))
            for each in table["annotations"]:
                answers[str(each["question_id"])] = tuple(str(answer["answer"]) for answer in each["answers"])
    return answers


def _answers(row: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(str(each["answer"]) if isinstance(each, Mapping) else str(each) for each in row.get("answers") or ())


def _vqa(files: Files, names: tuple[str, ...]) -> list[Question]:
    path, annotated = files.find(*names), _annotated(files)

    def question(row: dict[str, Any], place: str) -> Question:
        name, text = text_of(row, place, "question_id"), text_of(row, place, "sent", "question")
        answers = annotated.get(name) or _answers(row)
        if not answers:
            raise TaskDataError(f"{place}: expected its answers, or {' or '.join(ANNOTATIONS)} beside the file")
        return Question(name, text, answers, row)

    return collected(path, read_rows(path), question)


def _next(files: Files, names: tuple[str, ...]) -> list[Question]:
    path = files.find(*names)
    more = read_table(files.find(MORE_ANSWERS)) if files.has(MORE_ANSWERS) else {}

    def question(row: dict[str, Any], place: str) -> Question:
        video, qid = text_of(row, place, "video"), text_of(row, place, "qid")
        further = more.get(video, {}).get(qid, []) if isinstance(more, Mapping) else []
        answers = (text_of(row, place, "answer"), *([further] if isinstance(further, str) else map(str, further)))
        return Question(f"{video}_{qid}", text_of(row, place, "question"), answers, row)

    return collected(path, _csv(path), question, first=2, of="line")


def _csv(path: Path) -> Iterable[dict[str, Any]]:
    try:
        with path.open(encoding="utf-8", newline="") as file:
            yield from csv.DictReader(file)
    except UnicodeDecodeError as error:
        raise TaskDataError(f"{path}: expected UTF-8 text: {error}") from error


def _vqa_task(name: str) -> Task:
    test = (f"karpathy_test_q_{name}.json",)
    rules = {"vqacl": vqa_text.VQA_V2, "labels": vqa_text.VQA_LABELS}
    return Task(name, (name,), rules, (f"karpathy_train_q_{name}.json",), test, lambda files: _vqa(files, test))


_NEXT_QA = next_qa()


def _next_task(name: str) -> Task:
    test = (f"test_{name}.csv",)
    return Task(name, (name,), {"vqacl": _NEXT_QA}, (f"train_{name}.csv",), test, lambda files: _next(files, test))


VQACL = PublishedSuite(
    "vqacl",
    tuple(map(_vqa_task, TYPES)),
    ("vqa/Partition_Q", "datasets/vqa/Partition_Q", "Partition_Q", "vqa", "datasets/vqa", "."),
)
_NEXT_FOLDERS = ("Partition_Q", "Partition_Q_v2")
NEXT_QA = PublishedSuite(
    "nextqa",
    tuple(map(_next_task, NEXT_TYPES)),
    (*[f"{at}{name}" for name in _NEXT_FOLDERS for at in ("nextqa/", "datasets/nextqa/", "")], "nextqa", "."),
    not_learned="its questions are about videos, and examples may have pictures alone",
)
