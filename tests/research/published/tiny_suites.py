"""Tiny suites in the published layouts, with made-up rows."""

import csv
import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from PIL import Image

from benchmarks.research.published.rows import pictures_of
from benchmarks.research.published.suites.llava import TYPES

Row = dict[str, Any]
CLOSING = "\nAnswer the question using a single word or phrase."


def write(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))


def taught_row(number: int, image: str | None, answer: str, name: str = "id", asked: str = "What is it?") -> Row:
    text = f"<image>\n{asked}{CLOSING}" if image else asked
    turns = [{"from": "human", "value": text}, {"from": "gpt", "value": answer}]
    return {name: f"t{number}", **({"image": image} if image else {}), "conversations": turns}


def asked_row(number: int, image: str, answer: str, asked: str = "What is it?", **more: Any) -> Row:
    return {"question_id": f"q{number}", "image": image, "text": asked + CLOSING, "answer": answer, **more}


def write_task(folder: Path, train: str, test: str, answers: Sequence[str], image: str) -> None:
    write(folder / train, [taught_row(number, image, answer) for number, answer in enumerate(answers)])
    write(folder / test, [asked_row(number, image, answer) for number, answer in enumerate(answers)])


def write_ucit(data: Path) -> None:
    """As HiDe-LLaVA's README has it."""
    at = data / "instructions"
    for name in ("ArxivQA", "CLEVR"):
        write_task(at / name, "train_4w.json", "test_3000.json", ["A", "B"], f"{name}/images/a.png")
    for name in ("ImageNet-R", "IconQA"):
        write_task(at / name, "train.json", "test_3000.json", ["tree", "boat"], f"{name}/a.png")
    for name, train in (("VizWiz", "train.json"), ("Flickr30k", "train_brief_4w.json")):
        write_task(at / name, train, "test_3000.json", ["a dog runs", "two cats sleep"], f"{name}/a.png")
        annotations = [
            {"image_id": image, "caption": caption}
            for image, captions in ((1, ["a dog runs", "the dog is running"]), (2, ["two cats sleep", "cats lie here"]))
            for caption in captions
        ]
        write(at / name / "val_coco_type_3000.json", {"images": [{"id": 1}, {"id": 2}], "annotations": annotations})


def write_coin(data: Path) -> None:
    """As CoIN's scripts have it."""
    at = data / "playground" / "Instructions_Original"
    for name, test in (("VizWiz", "val"), ("VQAv2", "val"), ("OCRVQA", "test"), ("ImageNet", "test"), ("GQA", "test")):
        write_task(at / name, "train.json", f"{test}.json", ["red", "blue"], f"{name}/a.jpg")
    write_task(at / "TextVQA", "train.json", "val.json", ["red", "blue"], "TextVQA/a.jpg")
    answers = [{"question_id": f"q{number}", "answers": [word] * 10} for number, word in enumerate(["red", "blue"])]
    write(at / "TextVQA" / "TextVQA_0.5.1_val.json", {"data": answers})
    balanced = {f"q{number}": {"answer": word, "isBalanced": True} for number, word in enumerate(["red", "blue"])}
    write(at / "GQA" / "testdev_balanced_questions.json", balanced)
    rows = [asked_row(number, "", "A", "Which?\nA. left\nB. right") for number in range(2)]
    write(at / "ScienceQA" / "test.json", [{**row, "image": None} for row in rows])
    write(at / "ScienceQA" / "train.json", [taught_row(0, None, "A"), taught_row(1, "ScienceQA/a.png", "B")])
    problem = {"choices": ["left", "right"], "image": None}
    write(at / "ScienceQA" / "problems.json", {"q0": {**problem, "answer": 0}, "q1": {**problem, "answer": 1}})
    boxes = ["[0.10,0.25,0.40,0.75]", "[0.50,0.10,0.90,0.60]"]
    more = [{"answer_bbox": box, "size": [640, 480]} for box in boxes]
    asked = "Please provide the bounding box coordinate of the region this sentence describes: cup."
    rows = [asked_row(number, "COCO2014/a.jpg", "", asked, **of) for number, of in enumerate(more)]
    write(at / "Grounding" / "test.json", rows)
    write(
        at / "Grounding" / "train.json", [taught_row(number, "COCO2014/a.jpg", box) for number, box in enumerate(boxes)]
    )


def write_vqa10(data: Path, names: Sequence[str]) -> None:
    for name in names:
        write(
            data / "CL4VQA" / "train" / f"train_q_{name}.json",
            [taught_row(number, "train2014/a.jpg", "red") for number in range(2)],
        )
        rows = [asked_row(number, "val2014/a.jpg", answer) for number, answer in enumerate(["red", "2"])]
        write(data / "CL4VQA" / "test" / f"test_q_{name}.json", rows)


def write_vqacl(data: Path, names: Sequence[str]) -> None:
    for name in names:
        row = {"img_id": "COCO_val2014_000000000001", "sent": "How many?", "label": {"2": 1.0}}
        rows = [{**row, "question_id": number, "answers": [{"answer": "2"}] * 10} for number in range(2)]
        for split in ("train", "test"):
            write(data / "vqa" / "Partition_Q" / f"karpathy_{split}_q_{name}.json", rows)


def write_next_qa(data: Path, types: Sequence[str]) -> None:
    columns = ["video", "frame_count", "width", "height", "question", "answer", "qid", "type", "bigCate"]
    for name in types:
        for split in ("train", "test"):
            path = data / "nextqa" / "Partition_Q" / f"{split}_{name}.csv"
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("w", newline="") as file:
                table = csv.writer(file)
                table.writerows([columns, [100, 900, 640, 480, "what did the child do", "run", 2, name, 68]])
    write(data / "nextqa" / "add_reference_answer_test.json", {"100": {"2": "walk"}})


def write_domain(data: Path) -> None:
    for name in ("vqa_rad", "slake", "pathvqa"):
        rows = [
            {**taught_row(number, "a.jpg", answer), "answer_type": kind}
            for number, (answer, kind) in enumerate((("No", "CLOSED"), ("left lung", "OPEN")))
        ]
        write(data / "medicine" / name / "test.json", rows)
        write(data / "medicine" / name / "train.json", rows)
    for name, answers in (
        ("chartqa", ["10", "Red"]),
        ("chart2table", ["a | b\n1 | 2"] * 2),
        ("chart2text", ["the sales rise in every year"] * 2),
    ):
        write_task(data / "chart" / name, "train.json", "test.json", answers, "a.png")


def write_liit(data: Path) -> None:
    box = {"answer_bbox": [0, 0, 50, 50], "size": [100, 100]}
    rows = [asked_row(number, "a.jpg", "", **box) for number in range(2)]
    write(data / "refcoco" / "test.json", rows)
    write_task(data / "mmlu", "train.json", "test.json", ["A", "B"], "a.png")
    for name in ("coco-cn", "flickr8k-cn"):
        write(data / name / "test.json", [asked_row(0, "a.jpg", "") | {"answer": ["两只小船在湖上", "湖上有船"]}])
    write(data / "textvqa" / "test.json", [asked_row(0, "a.jpg", "red")])
    write(data / "textvqa" / "TextVQA_0.5.1_val.json", {"data": [{"question_id": "q0", "answers": ["red"] * 10}]})
    write(data / "scienceqa" / "test.json", [asked_row(0, "a.jpg", "A")])
    write(data / "scienceqa" / "problems.json", {"q0": {"choices": ["left", "right"], "answer": 0, "image": "a.png"}})


def write_predictions(path: Path, texts: Sequence[tuple[str, str]]) -> Path:
    path.write_text("".join(json.dumps({"question_id": name, "text": text}) + "\n" for name, text in texts))
    return path


def write_pictures(data: Path, root: str) -> None:
    """Every picture that a row names, below the image root."""
    for path in [*data.rglob("*.json")]:
        rows = json.loads(path.read_text())
        for row in rows if isinstance(rows, list) else []:
            for picture in pictures_of(row):
                file = data / root / picture
                file.parent.mkdir(parents=True, exist_ok=True)
                Image.new("RGB", (48, 48), (200, 30, 30)).save(file)


# Of the suites that can be learned: what writes one, and the root of its pictures.
WRITERS: dict[str, tuple[Callable[[Path], None], str]] = {
    "ucit": (write_ucit, "datasets"),
    "coin": (write_coin, "cl_dataset"),
    "vqa10": (partial(write_vqa10, names=TYPES), "data"),
    "vqacl": (partial(write_vqacl, names=TYPES), "."),
    "domain": (write_domain, "."),
}
