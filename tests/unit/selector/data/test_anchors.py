"""The anchor store: digest-checked, whole after a kill, and with the latest anchors of each task."""

import shutil
from pathlib import Path
from threading import Thread

import pytest

import selector.data.anchors as module
from inducekv_vllm.errors import ConfigError, TaskDataError
from selector.data.anchors import AnchorStore, examples_digest
from selector.data.choice import choose_anchors
from selector.data.examples import Example, read_task
from tests.task_data import record, write_task
from tests.unit.selector.stream import full_disk


@pytest.fixture
def tasks(tmp_path: Path) -> list[list[Example]]:
    """Two tasks of four examples; two examples of a task share a picture."""
    made = []
    for name in ("colours", "counts"):
        records = [record(number, id=f"{name}{number}", task=name) for number in range(4)]
        records[3]["messages"] = records[0]["messages"]
        made.append(read_task(write_task(tmp_path / name, records, num_pictures=4)))
    return made


@pytest.fixture
def store(tmp_path: Path) -> AnchorStore:
    return AnchorStore(tmp_path / "anchors")


def fill(store: AnchorStore, tasks: list[list[Example]]) -> None:
    for examples in tasks:
        store.append(examples)


def test_what_was_appended_is_read_back_in_the_order_of_the_stream(
    tmp_path: Path, store: AnchorStore, tasks: list[list[Example]]
) -> None:
    assert store.tasks() == ()
    assert store.read() == []
    fill(store, tasks)
    shutil.rmtree(tmp_path / "colours")  # the store has copies of its own
    found = AnchorStore(store.folder).read()
    assert examples_digest(found) == examples_digest([*tasks[0], *tasks[1]])
    assert len(list((store.folder / "0000" / "images").iterdir())) == 3
    files = [path for path in store.folder.rglob("*") if path.is_file() and path.name != "manifest.json"]
    assert store.bytes() == sum(path.stat().st_size for path in files)
    assert not list(store.folder.rglob("*.tmp"))


def test_anchors_of_a_task_take_the_place_of_earlier_ones(store: AnchorStore, tasks: list[list[Example]]) -> None:
    fill(store, tasks)
    store.append(tasks[0][:2])
    assert [example.id for example in store.read()] == [
        "counts0",
        "counts1",
        "counts2",
        "counts3",
        "colours0",
        "colours1",
    ]
    assert {example.task for example in store.read(except_tasks=["counts"])} == {"colours"}
    assert sorted(path.name for path in store.folder.glob("[0-9]*")) == ["0001", "0002"]
    store.append([*tasks[0], *tasks[1]])
    with pytest.raises(ConfigError, match="of the tasks colours, counts together"):
        store.append(tasks[0])
    assert len(store.read()) == 8


@pytest.mark.parametrize("damage", ["answer", "picture", "removed"])
def test_damage_is_noticed(store: AnchorStore, tasks: list[list[Example]], damage: str) -> None:
    fill(store, tasks)
    lines = store.folder / "0001" / "examples.jsonl"
    pictures = sorted((store.folder / "0001" / "images").iterdir())
    if damage == "answer":
        lines.write_text(lines.read_text().replace("answer 2", "answer 9"))
    elif damage == "picture":
        pictures[0].write_bytes(pictures[1].read_bytes())
    else:
        lines.write_text("".join(lines.read_text().splitlines(keepends=True)[:-1]))
    with pytest.raises(TaskDataError, match=r"0001/examples\.jsonl: the anchors do not match their digest"):
        store.read()


def test_a_run_killed_before_the_manifest_leaves_the_store_as_it_was(
    store: AnchorStore, tasks: list[list[Example]]
) -> None:
    for number, examples in enumerate(tasks):
        # What SIGKILL between the folder and the manifest leaves behind.
        module._write_examples(store.folder / f"{number:04d}", examples[:2])
        assert len(store.tasks()) == number
        store.append(examples)
        assert len(store.read()) == 4 * (number + 1)


def test_a_full_disk_leaves_the_store_as_it_was(
    store: AnchorStore, tasks: list[list[Example]], monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(store, tasks[:1])
    monkeypatch.setattr(module, "replace_file", full_disk)
    with pytest.raises(ConfigError, match=r"cannot write the anchors: .*No space left"):
        store.append(tasks[1])
    assert len(store.read()) == 4
    assert not (store.folder / "0001").exists()


def test_two_runs_that_end_at_once_both_append(
    store: AnchorStore, tasks: list[list[Example]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second begins while the first writes its folder."""
    write, others = module._write_examples, list[Thread]()

    def meanwhile(folder: Path, examples: list[Example]) -> int:
        if not others:
            others.append(Thread(target=AnchorStore(store.folder).append, args=(tasks[1],)))
            others[0].start()
            others[0].join(timeout=0.3)
        return write(folder, examples)

    monkeypatch.setattr(module, "_write_examples", meanwhile)
    store.append(tasks[0])
    others[0].join()
    assert [task.tasks for task in store.tasks()] == [("colours",), ("counts",)]
    assert len(store.read()) == 8


def test_anchors_are_distinct_and_follow_the_seed() -> None:
    examples = [Example(f"e{number}", "t", (), (), "", f"digest {number}") for number in range(50)]
    chosen = [each.id for each in choose_anchors(examples, 12, seed=0)]
    assert len(set(chosen)) == 12
    assert chosen == [each.id for each in examples if each.id in chosen]
    assert chosen == [each.id for each in choose_anchors(examples, 12, seed=0)]
    assert chosen != [each.id for each in choose_anchors(examples, 12, seed=1)]
    assert choose_anchors(examples, 99, seed=0) == examples
