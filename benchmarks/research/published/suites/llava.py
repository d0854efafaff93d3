"""UCIT, CoIN and the ten question types of VQAv2, which have LLaVA's rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from benchmarks.research.published.rows import read_questions, read_table
from benchmarks.research.published.scorers import boxes, captions, exact, recognition, science_qa, vqa_text
from benchmarks.research.published.scorers.scored import Question
from inducekv_vllm.errors import TaskDataError

from .layout import Files, PublishedSuite, Task

REFERENCES = "val_coco_type_3000.json"
_TRAIN = ("train_4w.json", "train_brief_4w.json", "train.json")
_TEST = ("test_3000.json", "test.json")


def _captions(files: Files) -> list[Question]:
    """Each row with the captions of its picture: the n-th row is of the n-th image of the references."""
    rows, path = read_questions(files.find(*_TEST)), files.find(REFERENCES)
    table = read_table(path)
    try:
        captions_of: dict[Any, list[str]] = {image["id"]: [] for image in table["images"]}
        for annotation in table["annotations"]:
            captions_of[annotation["image_id"]].append(str(annotation["caption"]))
    except (TypeError, KeyError) as error:
        raise TaskDataError(f"{path}: expected images with ids, and annotations with image_id and caption") from error
    if len(captions_of) != len(rows):
        raise TaskDataError(f"{path}: expected the captions of {len(rows)} pictures, found {len(captions_of)}")
    pairs = zip(rows, captions_of.values(), strict=True)
    if empty := next((row.id for row, of in zip(rows, captions_of.values(), strict=True) if not of), None):
        raise TaskDataError(f"{path}: the picture of question {empty!r} has no caption")
    return [replace(row, answers=tuple(of)) for row, of in pairs]


def science_qa_questions(files: Files) -> list[Question]:
    path = files.find("problems.json")
    problems = read_table(path)
    found = []
    for row in read_questions(files.find("test.json")):
        problem = problems.get(row.id) if isinstance(problems, Mapping) else None
        if problem is None:
            raise TaskDataError(
                f"{path}: there is no problem {row.id!r}, of which {files.find('test.json')} has a question"
            )
        more = {"choices": len(problem["choices"]), "has_image": problem.get("image") is not None}
        letter = science_qa.LETTERS[int(problem["answer"])]
        found.append(replace(row, answers=(letter,), row={**row.row, **more}))
    return found


def text_vqa_questions(files: Files) -> list[Question]:
    path = files.find("TextVQA_0.5.1_val.json")
    table = read_table(path)
    if not isinstance(table, Mapping) or not isinstance(table.get("data"), list):
        raise TaskDataError(f"{path}: expected an object with the list `data`")
    answers = {str(each["question_id"]): tuple(map(str, each["answers"])) for each in table["data"]}
    rows = read_questions(files.find("val.json", "test.json"))
    if unknown := next((row.id for row in rows if row.id not in answers), None):
        raise TaskDataError(f"{path}: there are no answers to question {unknown!r}")
    return [replace(row, answers=answers[row.id]) for row in rows]


def _gqa(files: Files) -> list[Question]:
    rows = read_questions(files.find("test.json"))
    if not files.has("testdev_balanced_questions.json"):
        return rows
    table = read_table(files.find("testdev_balanced_questions.json"))
    known = {name: each for name, each in table.items() if isinstance(each, Mapping)}
    return [
        replace(
            row,
            answers=(str(known[row.id]["answer"]),) if row.id in known else row.answers,
            row={**row.row, "balanced": bool(known[row.id].get("isBalanced", True)) if row.id in known else True},
        )
        for row in rows
    ]


def box_questions(files: Files) -> list[Question]:
    """Raises TaskDataError: the box of one is none."""
    questions = read_questions(files.find("test.json", "test_5k.json"), answer="answer_bbox")
    for question in questions:
        boxes.gold_box(question)
    return questions


def _ucit(name: str, *folders: str, **others: Any) -> Task:
    return Task(name, (name, *folders), {"hide": exact.EXACT}, _TRAIN, _TEST, **others)


UCIT = PublishedSuite(
    "ucit",
    (
        _ucit("ImageNet-R"),
        _ucit("ArxivQA"),
        Task(
            "VizWiz-Caption",
            ("VizWiz", "VizWiz-caption", "VizWiz-cap", "Vizcap"),
            {"hide": captions.CAPTIONS},
            _TRAIN,
            _TEST,
            _captions,
            others=(REFERENCES,),
        ),
        _ucit("IconQA"),
        _ucit("CLEVR-Math", "CLEVR"),
        Task(
            "Flickr30k",
            ("Flickr30k", "Flickr30k-cap"),
            {"hide": captions.CAPTIONS, "smolora": captions.SMOLORA},
            _TRAIN,
            _TEST,
            _captions,
            others=(REFERENCES,),
        ),
    ),
    ("instructions", "UCIT", "."),
)

COIN = PublishedSuite(
    "coin",
    (
        Task(
            "ScienceQA",
            ("ScienceQA",),
            {"coin": science_qa.COIN, "hide": science_qa.HIDE},
            read=science_qa_questions,
            new_tokens=1024,
            others=("problems.json",),
        ),
        Task(
            "TextVQA",
            ("TextVQA",),
            {"coin": vqa_text.TEXT_VQA},
            test=("val.json", "test.json"),
            read=text_vqa_questions,
            others=("TextVQA_0.5.1_val.json",),
        ),
        Task(
            "ImageNet",
            ("ImageNet",),
            {"coin": recognition.IMAGENET, "smolora": recognition.SMOLORA_IMAGENET},
            new_tokens=1024,
        ),
        Task("GQA", ("GQA",), {"coin": recognition.GQA}, read=_gqa),
        Task("VizWiz", ("VizWiz",), {"coin": exact.EXACT}, test=("val.json", "test.json")),
        Task("Grounding", ("Grounding",), {"coin": boxes.GROUNDING}, read=box_questions, new_tokens=1024),
        Task("VQAv2", ("VQAv2",), {"coin": exact.EXACT}, test=("val.json", "test.json"), new_tokens=1024),
        Task("OCR-VQA", ("OCRVQA", "OCR-VQA"), {"coin": exact.OCR_VQA}),
    ),
    (
        "playground/Instructions_Original",
        "Instructions_Original",
        "Instruction_Original",
        "Instructions_slim",
        "playground/data/CoIN/annotations",
        "annotations",
        ".",
    ),
)

TYPES = ["recognition", "location", "judge", "commonsense", "count", "action", "color", "type", "subcategory", "causal"]
VQA10 = PublishedSuite(
    "vqa10",
    tuple(
        Task(
            name,
            (name,),
            {"clmoe": exact.CLMOE},
            (f"train/train_q_{name}.json", f"train_q_{name}.json"),
            (f"test/test_q_{name}.json", f"test_q_{name}.json"),
            new_tokens=1024,
        )
        for name in TYPES
    ),
    ("CL4VQA", "."),
)
