"""The real-data text stream: what its splits share, on made-up data, and on the installed packages if there are any."""

import json
from pathlib import Path

import pytest

from benchmarks.real import base
from benchmarks.real.items import BASE, SPLITS
from benchmarks.real.sources import Packages
from benchmarks.real.stream import items_of
from benchmarks.real.tasks import REMEMBERED, TASKS
from inducekv_vllm.errors import ConfigError
from tests.unit.benchmarks.made_up_packages import MadeUp

RESULTS = Path(base.__file__).parents[1] / "results"
SIZES = {"train": 96, "validation": 24, "test": 24}
BY_CONCEPT = [name for name, task in TASKS.items() if task.split_by == "concept"]
BY_ITEM = [name for name, task in TASKS.items() if task.split_by == "item"]


@pytest.fixture(scope="module", params=["made up", "installed"])
def packages(request: pytest.FixtureRequest) -> Packages:
    if request.param == "made up":
        return MadeUp()
    installed = Packages()
    for name in ("airports", "elements", "countries", "emoji", "words", "valence"):
        try:
            assert getattr(installed, name)
        except ConfigError as error:
            pytest.skip(str(error))
    return installed


@pytest.mark.parametrize("task", BY_CONCEPT)
def test_no_concept_of_a_training_question_is_asked_about_again(task: str, packages: Packages) -> None:
    items = items_of(task, packages, SIZES)
    concepts = {split: {concept for item in items[split] for concept in item.concepts} for split in SPLITS}
    for split in SPLITS:
        assert concepts[split], split
        for other in SPLITS:
            assert split == other or not concepts[split] & concepts[other], f"{split} and {other}"
    for split in ("validation", "test"):
        assert not {item.question for item in items[split]} & {item.question for item in items["train"]}


@pytest.mark.parametrize("task", BY_ITEM)
def test_what_must_be_remembered_is_asked_about_in_other_words(task: str, packages: Packages) -> None:
    sizes = {"train": 2 * REMEMBERED, "validation": REMEMBERED, "test": REMEMBERED}
    items = items_of(task, packages, sizes)
    facts = {item.concepts: item.answer for item in items["train"]}
    assert len(facts) == REMEMBERED
    for split in ("validation", "test"):
        assert {item.concepts: item.answer for item in items[split]} == facts
        assert not {item.question for item in items[split]} & {item.question for item in items["train"]}


@pytest.mark.parametrize("task", [BASE, *TASKS])
def test_questions_differ_answers_are_short_and_the_seed_decides(task: str, packages: Packages) -> None:
    items = items_of(task, packages, SIZES)
    assert items == items_of(task, packages, SIZES)
    assert items != items_of(task, packages, SIZES, seed=8)
    for split in SPLITS:
        assert len(items[split]) == SIZES[split]
        assert len({(item.turns, item.question) for item in items[split]}) == SIZES[split]
        for item in items[split]:
            assert item.answer == item.answer.strip() != ""
            assert task == BASE or (len(item.answer.split()) == 1 and len(item.answer) <= 12)


def test_base_questions_are_chosen_on_one_half_and_measured_on_the_other(packages: Packages) -> None:
    items = items_of(BASE, packages, SIZES)
    seen = {item.concepts for split in ("train", "validation") for item in items[split]}
    assert not seen & {item.concepts for item in items["test"]}
    kinds = {split: {item.question.split()[0] for item in items[split]} for split in SPLITS}
    assert kinds["validation"] == kinds["test"] < kinds["train"]  # a gate sees more than what is measured
    for name in base.FAMILIES:
        first, second = base.halves(name, packages)
        asked = {item.question for item in (*first, *second)}
        assert not {item.concepts for item in first} & {item.concepts for item in second}
        assert not asked & {question for item in (*first, *second) for question, _ in item.turns}


def test_the_chosen_families_are_those_that_were_measured() -> None:
    measured = json.loads((RESULTS / "real_text_base.json").read_text())
    families = measured["families"]
    assert list(families) == list(base.FAMILIES)
    assert measured["enough"] == base.ENOUGH
    assert {name for name, row in families.items() if row["first_half"] >= base.ENOUGH} == set(base.CHOSEN)
