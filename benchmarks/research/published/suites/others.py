"""The domain suite and LiIT, whose own files cannot be had: neutral layouts, LLaVA's rows below <domain>/<dataset>.

Of the domain suite [https://aclanthology.org/2025.acl-long.1290] names, sizes and prompts were not found; its measures
are those of LLaVA-Med, ChartQA, DePlot. Of LiIT [https://arxiv.org/abs/2410.10636] two of five streams were not
released, nor its list of evaluations; these are the evaluators that are in its repository.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from benchmarks.research.published.rows import collected, read_questions, read_rows, text_of
from benchmarks.research.published.scorers import boxes, charts, language, medicine, science_qa, vqa_text
from benchmarks.research.published.scorers.scored import Question, Rule
from inducekv_vllm.errors import TaskDataError

from .layout import Files, PublishedSuite, Task
from .llava import box_questions, science_qa_questions, text_vqa_questions


def _of_conversations(files: Files) -> list[Question]:
    """Rows with `conversations` and `answer_type`, or flat ones."""
    path = files.find("test.json")

    def question(row: dict[str, Any], place: str) -> Question:
        name = text_of(row, place, "question_id", "id")
        if "conversations" in row:
            turns = {turn.get("from"): str(turn.get("value", "")) for turn in row["conversations"]}
            asked, answer = turns.get("human"), turns.get("gpt")
        else:
            asked, answer = text_of(row, place, "text"), text_of(row, place, "answer")
        if asked is None or answer is None:
            raise TaskDataError(f"{place}: expected a turn of human and one of gpt")
        return Question(name, asked.removeprefix("<image>").strip(), (answer,), row)

    return collected(path, read_rows(path), question)


def _listed(files: Files) -> list[Question]:
    """Flat rows, whose `answer` may be a list of references."""
    questions = read_questions(files.find("test.json"))
    lists = ((row, row.row["answer"]) for row in questions)
    return [replace(row, answers=tuple(map(str, many))) if isinstance(many, list) else row for row, many in lists]


def _domain(folder: str, rule: Rule, publisher: str, *, turns: bool = False) -> Task:
    read = _of_conversations if turns else _listed
    return Task(folder.split("/")[1], (folder,), {publisher: rule}, read=read)


DOMAIN = PublishedSuite(
    "domain",
    (
        *(
            _domain(f"medicine/{name}", medicine.MEDICINE, "llava-med", turns=True)
            for name in ("vqa_rad", "slake", "pathvqa")
        ),
        _domain("chart/chartqa", charts.CHART_QA, "pix2struct"),
        _domain("chart/chart2table", charts.CHART_TO_TABLE, "deplot"),
        _domain("chart/chart2text", charts.CHART_TO_TEXT, "sacrebleu"),
    ),
    (".",),
)

LIIT = PublishedSuite(
    "liit",
    (
        Task("RefCOCO", ("refcoco",), {"adapt-inf": boxes.REFCOCO}, read=box_questions),
        Task("TextVQA", ("textvqa",), {"adapt-inf": vqa_text.TEXT_VQA}, read=text_vqa_questions),
        Task(
            "ScienceQA",
            ("scienceqa",),
            {"adapt-inf": science_qa.LLAVA},
            read=science_qa_questions,
            others=("problems.json",),
        ),
        Task("MMLU", ("mmlu",), {"adapt-inf": language.MMLU}, new_tokens=16),
        Task("COCO-CN", ("coco-cn",), {"adapt-inf": language.MULTILINGUAL}, read=_listed),
        Task("Flickr8k-CN", ("flickr8k-cn",), {"adapt-inf": language.MULTILINGUAL}, read=_listed),
    ),
    (".",),
    not_learned="what it trains on and what it asks are different tasks, and two of its five sources were not released",
)
