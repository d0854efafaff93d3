"""Facts on other people's questions: every form of a set is read, and what is counted is what was asked."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.research.facts import public

NEAR = {"question": "What is the code of Oslo?", "answer": "OSL", "kind": "another subject"}


def written(folder: Path, name: str, rows: list[dict[str, Any]], *, packed: bool = False) -> None:
    (folder / name).mkdir()
    text = "".join(json.dumps(row) + "\n" for row in rows)
    if packed:
        (folder / name / "dev.jsonl.gz").write_bytes(gzip.compress(text.encode()))
    else:
        (folder / name / "dev.jsonl").write_text(text)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    codes = [
        {
            "question": f"What is the code of {name}?",
            "answer": name[:3],
            "paraphrases": [f"Code of {name}?", "Who?"],
            "locality": [NEAR],
        }
        for name in ("Lima", "Quito", "Cairo")
    ]
    written(tmp_path, "codes", codes, packed=True)
    anna = {"question": "Who pays Anna?", "answer": "Ben", "same": ["Anna is paid by whom?"], "other": ["Who is Anna?"]}
    written(tmp_path, "faq", [anna])
    written(tmp_path, "google", [{"question": "who sang it"}, {"question": "what is the code of lima"}])
    written(tmp_path, "everyday", [{"text": "Write a poem."}])
    written(tmp_path, "intents", [{"text": "what is the code of lima", "intent": "code"}])
    return tmp_path


def test_every_form_is_read(data: Path) -> None:
    sets, outside = public.read_sets(data)
    assert [(each.name, len(each.facts)) for each in sets] == [("codes", 3), ("faq", 1)]
    assert outside == {"everyday": ["Write a poem."], "google": ["who sang it", "what is the code of lima"]}
    assert sets[1].facts[0].locality == [("Who is Anna?", None, "resembles")]


def test_what_is_counted(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Half of the paraphrases say nothing; a request that is a stored question may get its answer."""
    output = tmp_path / "found.json"
    assert (
        public.main(["--data", str(data), "--sizes", "2", "--only", "codes", "together", "--output", str(output)]) == 0
    )
    rows = json.loads(output.read_text())["rows"]
    assert [(row["set"], row["facts"]) for row in rows] == [
        ("codes", 2),
        ("codes", 3),
        ("together", 2),
        ("together", 4),
    ]
    shares = {name: (each["share"], each["of"]) for name, each in rows[1]["shares"].items()}
    assert shares == {
        "stored": (1.0, 3),
        "in other words": (0.5, 6),
        "wrong": (0.0, 6),
        "another subject": (0.0, 3),
        "everyday": (0.0, 1),
        "google": (0.0, 2),
    }
    assert "| codes | 3 | 1.000 | 0.500 | 0.000 | another subject 0.000 of 3" in capsys.readouterr().out


def test_facts_that_ask_each_other_are_taught_by_halves() -> None:
    facts = [public.Fact(f"What is {n}?", str(n), (), [(f"What is {n + 1}?", None, "next")]) for n in range(4)]
    assert [each.answer for each in public.taught_of(public.FactSet("web", facts))] == ["0", "2"]
