"""The real-picture stream, on made-up packages: what its splits share, and what tasks ask about."""

from pathlib import Path

import pytest
from PIL import Image

from benchmarks.real.items import BASE, SPLITS
from benchmarks.research.continual.suites import load_suite
from benchmarks.research.continual.suites.made import load_real_pictures
from benchmarks.research.real_pictures import stream, train
from benchmarks.research.real_pictures.concepts import Concepts
from benchmarks.research.real_pictures.icons import PACKAGES, Icons
from benchmarks.research.real_pictures.questions import vocabulary
from benchmarks.research.real_pictures.stream import examples
from benchmarks.research.real_pictures.tasks import TASKS
from selector.data.examples import read_task
from tests.research.made_up_icons import made_up_concepts, save_icons
from tests.unit.benchmarks.made_up_packages import MadeUp

SIZES = {"train": 48, "validation": 24, "test": 24}


@pytest.fixture(scope="module")
def icons(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache with made-up packages; not to be changed."""
    return save_icons(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def concepts(icons: Path) -> Concepts:
    return made_up_concepts(icons)


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Nothing is drawn; (package, concept) of what would have been."""
    asked: list[tuple[str, str]] = []

    def blank(icons: Icons, name: str) -> Image.Image:
        asked.append((icons.package.name, name))
        return Image.new("RGBA", (64, 64))

    monkeypatch.setattr(stream, "drawing", blank)
    monkeypatch.setattr(train, "drawing", blank)
    return asked


def test_no_vendor_draws_for_two_splits() -> None:
    vendors = {split: {package.vendor for package in PACKAGES if package.role == split} for split in SPLITS}
    assert all(vendors.values())
    assert sum(map(len, vendors.values())) == len(set().union(*vendors.values()))


@pytest.mark.parametrize("task", [BASE, *TASKS])
def test_pictures_of_a_split_are_by_its_vendors(task: str, concepts: Concepts, undrawn: list[tuple[str, str]]) -> None:
    roles = {package.name: package.role for package in PACKAGES}
    for split in SPLITS:
        undrawn.clear()
        records = [record for record, _ in examples(task, split, 40, concepts, MadeUp())]
        assert {roles[package] for package, _ in undrawn} == {split}
        assert [record["concepts"] for record in records] == [[name] for _, name in undrawn]


def test_tasks_ask_about_what_the_model_was_never_taught(concepts: Concepts) -> None:
    base, seen = set(concepts.base), set()
    for name, task in TASKS.items():
        splits = task.facts(concepts, MadeUp())
        asked = [set(splits[split]) for split in SPLITS]
        assert all(asked)
        if task.split_by == "item":
            assert splits["train"] == splits["validation"] == splits["test"]
            assert len(set(splits["train"].values())) > 3
        else:
            assert sum(map(len, asked)) == len(set().union(*asked))
        assert not seen & set().union(*asked), name
        seen |= set().union(*asked)
        assert name == "german" or not base & set().union(*asked)
    words = vocabulary(concepts.base, MadeUp())
    answers = {answer for task in TASKS.values() for _, answer in task.facts(concepts, MadeUp())["train"].values()}
    assert answers <= set(words)  # the model can say them
    assert not {concept.name for concept in concepts.new} & set(words)


def test_the_suite_is_written_once_and_its_examples_are_read(
    icons: Path, concepts: Concepts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("resvg_py")
    suite = load_real_pictures(tmp_path, SIZES, SIZES, concepts, MadeUp())
    assert [task.name for task in suite.tasks] == list(TASKS)
    for name in (BASE, *TASKS):
        for split, size in SIZES.items():
            read = read_task(tmp_path / name / f"{split}.jsonl")
            assert len(read) == size
            assert {len(example.images) for example in read} == {1}
            assert {image.size for example in read for image in example.load_images()} == {(48, 48)}
            assert len({example.images[0].read_bytes() for example in read}) == size
    monkeypatch.setenv("INDUCEKV_CACHE", str(tmp_path / "none"))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert load_suite("real-pictures", tmp_path).digest() == suite.digest()


# The model.
