"""The gate on other people's requests: what is a task, what is outside, and what is counted."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.research.gate import public
from benchmarks.research.gate.public_sets import KINDS, SETS, PublicBundle, PublicData, PublicTask, half_of
from tests.gates import small_fits
from tests.tiny_families import FAMILIES

INTENTS, EACH = 8, 140


def written(folder: Path, name: str, rows: list[dict[str, Any]]) -> None:
    (folder / name).mkdir()
    (folder / name / "dev.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def requests(name: str, domain: str, extra: dict[str, str]) -> list[dict[str, Any]]:
    return [
        {
            "text": f"{name} {domain} request {intent} number {n}",
            "intent": f"{domain} {intent}",
            "domain": domain,
            **extra,
        }
        for intent in range(INTENTS)
        for n in range(EACH)
    ]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sets")
    strange = [{"text": f"strange thing {n}", "intent": None, "domain": None} for n in range(20)]
    home, travel = (requests("clinc150", domain, {}) for domain in ("home", "travel"))
    written(folder, "clinc150", [*home, *travel, *home[:3], *strange])
    written(folder, "hwu64", [*requests("hwu64", "alarm", {}), *requests("hwu64", "news", {})])
    for name in ("banking77", "snips"):
        written(folder, name, requests(name, "all", {}))  # eight intents are all of two tasks of the bank
    foreign = [{"text": f"Anfrage {n}", "intent": "all 1", "lang": "de"} for n in range(20)]
    written(folder, "xsid", [*requests("xsid", "all", {"lang": "en"}), *foreign])
    written(folder, "everyday", [{"text": f"write a poem {n}"} for n in range(20)])
    written(folder, "nq_open", [{"question": f"who sang song {n}"} for n in range(20)])
    return folder


@pytest.mark.parametrize("name", SETS)
def test_a_task_is_some_intents_and_nothing_is_taught_and_asked(data: Path, name: str) -> None:
    found = PublicData.read(data, "report").bundle(name, 2, 32, 0)
    assert found is not None
    texts = list(found.texts)
    assert Counter(texts).most_common(1)[0][1] == 1
    assert {half_of(text) for text in texts} == {"report"}
    assert set(found.others) <= set(KINDS)
    assert not {*found.more_siblings, *found.more_elsewhere} & set(texts)  # what is given is not asked
    for task in found.tasks:
        assert len(task.train) == 32
        assert len(task.name.split("+")) == SETS[name].intents
    assert ("sibling intents" in found.others) == (name in ("clinc150", "hwu64"))
    assert PublicData.read(data, "report").bundle(name, 40, 32, 0) is None


def test_shares() -> None:
    tasks = (PublicTask("a", (), ("1", "2")), PublicTask("b", (), ("3", "4")))
    bundle = PublicBundle(tasks, {"out of scope": ("5", "6"), "Google": ("7",)})
    margins = np.array([[1, 0], [2, 3], [-2, 0.5], [-1, -0.5], [-1, -0.25], [-3, 2], [-1, -1]], dtype=float)
    found = public.shares(bundle, margins)
    assert found["routed"] == 0.5
    assert found["right_task"] == 0.75
    assert found["opened"] == {"out of scope": 0.5, "Google": 0.0}
    assert found["opened_at_95"] == {"out of scope": 1.0, "Google": 0.0}
    assert found["auroc"] == (2 + 1 + 1 + 0) / 8  # 3 above both, 1 and 0.5 above one, -0.5 above none
    assert found["asked"] == {"own": 4, "out of scope": 2, "Google": 1}


def test_the_whole_of_it(data: Path, tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "out.json"
    model = str(FAMILIES["llama"](tmp_path / "model"))
    command = ["--data", str(data), "--model", model, "--sets", "snips", "--tasks", "2"]
    command += ["--examples", "8", "--cache", str(tmp_path / "cache"), "--out", str(out)]
    with small_fits(), pytest.MonkeyPatch.context() as patch:
        patch.setattr("benchmarks.research.gate.public_rivals.REQUESTS", 30)
        assert public.main(command) == 0
    (cell,) = json.loads(out.read_text())["cells"]
    assert (cell["set"], cell["tasks"], cell["examples"], cell["had"]) == ("snips", 2, 8, [8, 8])
    assert len(cell["methods"]) == 5
    for measured in cell["methods"].values():
        assert 0 <= measured["routed"] <= measured["right_task"] <= 1
        assert measured["opened"].keys() == set(KINDS) - {"sibling intents"}
    assert public.means([cell], "gate")["bytes"] > 0
    assert 0 <= public.means([cell], "gate")["routed_wrapped"] <= 1
    capsys.readouterr()
    assert public.main(command) == 0  # everything is known
    assert not capsys.readouterr().out
    with small_fits():
        assert public.main([*command, "--traffic", "5", "--gate-alone"]) == 0
    cells = json.loads(out.read_text())["cells"]
    assert [(cell["traffic"], len(cell["methods"])) for cell in cells] == [(0, 5), (5, 1)]
