"""Facts on other people's questions: what is answered from the memory, and what must stay untouched.

    python -m benchmarks.research.facts.public --data DIR [--sizes 100 1000 10000] [--only NAME ...]
        [--judge MODEL --odds FILE] [--encoder MODEL] [--most 150] [--output FILE]

DIR has a folder for each set, with JSON lines (`.jsonl` or `.jsonl.gz`) of these forms:

    {"question": ..., "answer": ..., "paraphrases": [...], "locality": [{"question": ..., "answer": ..., "kind": ...}]}
    {"question": ..., "answer": ..., "same": [...], "other": [...]}          the same, with one kind of locality
    {"question": ..., "asked": ..., "same": false}                           "asked" asks something else, or the same
    {"multi_hop": [...]}                                                     questions that no fact of the set answers
    {"question": ...} or {"text": ...}                                       requests that no set answers

Where locality asks what other rows of the set do, every second row is taught. A set's facts are taught in the given
sizes, and all of them; "together" has those of all sets. `stored` is the share of the taught questions that get their
own answer; `in other words` that of paraphrases, the measure that editors call generalisation; `wrong` the paraphrases
that get another answer; everything else is the share that is answered although it must not be, by kind. Words
decide, and what they leave open a model judges, if one is given. Prints a table in Markdown.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from statistics import median
from typing import Any, Final

from benchmarks.machine import describe_machine
from inducekv_vllm.backbone.meaning import MeaningIndex, SentenceEncoder
from inducekv_vllm.backbone.stored_facts import Candidates, StoredQuestions
from inducekv_vllm.facts import same_words
from inducekv_vllm.judge import can_be_asked
from inducekv_vllm.teaching import fact_of

from .judge import PairJudge

RESULTS: Final = Path(__file__).parents[2] / "results" / "facts_public.json"
SIZES: Final = (100, 1000, 10_000)
TOGETHER: Final = "together"
STORED, WORDS, WRONG = "stored", "in other words", "wrong"
MULTI_HOP, RESEMBLES, CONTRAST = "multi-hop", "resembles", "contrast"


@dataclass(frozen=True)
class Fact:
    question: str
    answer: str
    paraphrases: Sequence[str]
    locality: Sequence[tuple[str, str | None, str]]  # questions with their answers, if they are known, and kinds


@dataclass
class FactSet:
    name: str
    facts: list[Fact] = field(default_factory=list)
    untouched: list[tuple[str, str]] = field(default_factory=list)  # questions with their kinds


@dataclass
class Share:
    """Of questions of one kind, those that are answered so."""

    answered: int = 0
    asked: int = 0

    def add(self, answered: bool) -> None:
        self.answered, self.asked = self.answered + answered, self.asked + 1

    def as_json(self) -> dict[str, Any]:
        return {"share": self.answered / self.asked if self.asked else None, "of": self.asked}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="the folder with a folder for each set")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="facts taught at a time (%(default)s)")
    parser.add_argument("--only", nargs="+", help="sets (default: all, and all together)")
    parser.add_argument("--most", type=int, help="questions of a kind that are asked (default: all)")
    parser.add_argument("--judge", metavar="MODEL", help="judges what words leave open, in bfloat16")
    parser.add_argument("--encoder", metavar="MODEL", help="finds candidates for the judge by meaning, too")
    parser.add_argument("--odds", type=Path, help="file of what it has said, to go on with (default: nothing is kept)")
    parser.add_argument("--seed", type=int, default=0, help="of what is chosen (%(default)s)")
    parser.add_argument("--output", type=Path, default=RESULTS, help="JSON file (%(default)s)")
    options = parser.parse_args(arguments)
    sets, outside = read_sets(options.data)
    if not sets:
        print(f"{options.data}: no set of facts found", file=sys.stderr)
        return 2
    judge = None if options.judge is None else PairJudge(options.judge, options.odds)
    encoder = None if options.encoder is None else SentenceEncoder(options.encoder)
    found: list[dict[str, Any]] = []
    for each in chosen(sets, options.only):
        taught = taught_of(each)
        for size in [size for size in options.sizes if size < len(taught)] + [len(taught)]:
            chosen_facts = Random(options.seed).sample(taught, size) if size < len(taught) else taught
            asked = sampled(list(asked_of(each, chosen_facts, outside)), options.most, options.seed)
            found.append(measured(each, chosen_facts, asked, judge, encoder))
            print(json.dumps(found[-1]), file=sys.stderr, flush=True)
    known = {} if judge is None else {"judge": Path(options.judge).name, "ability": judge.ability._asdict()}
    known |= {} if encoder is None else {"encoder": Path(options.encoder).name}
    options.output.write_text(json.dumps({"machine": describe_machine(), **known, "rows": found}, indent=1) + "\n")
    print(table(found))
    return 0


def read_sets(folder: Path) -> tuple[list[FactSet], dict[str, list[str]]]:
    """The sets, and by name the requests that none of them answers."""
    sets, outside = list[FactSet](), dict[str, list[str]]()
    for path in sorted(path for path in folder.iterdir() if path.is_dir()):
        made = FactSet(path.name)
        for row in (row for file in sorted(path.glob("*.jsonl*")) for row in rows_of(file)):
            if "multi_hop" in row:
                made.untouched += [(question, MULTI_HOP) for question in row["multi_hop"]]
            elif "asked" in row:
                add_contrast(made, row)
            elif "question" in row and ("paraphrases" in row or "same" in row):
                made.facts.append(fact_of_row(row))
            elif "intent" not in row and ("text" in row or "question" in row):
                outside.setdefault(path.name, []).append(str(row.get("text", row.get("question"))))
        if made.facts:
            sets.append(made)
    return sets, outside


def add_contrast(made: FactSet, row: Mapping[str, Any]) -> None:
    """A row of a question and one that nearly says the same; a question's rows follow each other."""
    words, others = ([row["asked"]], []) if row["same"] else ([], [(row["asked"], None, CONTRAST)])
    if made.facts and made.facts[-1].question == row["question"]:
        last = made.facts.pop()
        words, others = [*last.paraphrases, *words], [*last.locality, *others]
    made.facts.append(Fact(row["question"], row["question"], words, others))


def rows_of(path: Path) -> Iterator[dict[str, Any]]:
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rt", encoding="utf-8") as lines:
        yield from map(json.loads, lines)


def fact_of_row(row: Mapping[str, Any]) -> Fact:
    locality = [(each["question"], each.get("answer"), each["kind"]) for each in row.get("locality", ())]
    locality += [(question, None, RESEMBLES) for question in row.get("other", ())]
    answer = row.get("answer") or row.get("id") or row["question"]
    return Fact(row["question"], str(answer), row.get("paraphrases") or row.get("same") or (), locality)


def chosen(sets: Sequence[FactSet], only: Sequence[str] | None) -> list[FactSet]:
    together = FactSet(TOGETHER, [Fact(fact.question, fact.answer, (), ()) for each in sets for fact in each.facts])
    return [each for each in [*sets, together] if only is None or each.name in only]


def taught_of(facts: FactSet) -> list[Fact]:
    """Its facts, of equal questions the last; every second one where locality asks what others do."""
    asked_of_others = {same_words(question) for fact in facts.facts for question, _, _ in fact.locality}
    is_web = any(same_words(fact.question) in asked_of_others for fact in facts.facts)
    taught = facts.facts[::2] if is_web else facts.facts
    return list({same_words(fact.question): fact for fact in taught}.values())


@dataclass(frozen=True)
class Asked:
    """A question, and what makes its answer right or wrong."""

    kind: str
    text: str
    fact: Fact | None = None  # the one that should answer
    answer: str | None = None  # which may be given, too


def asked_of(facts: FactSet, taught: Sequence[Fact], outside: Mapping[str, Sequence[str]]) -> Iterator[Asked]:
    known = {same_words(fact.question): fact for fact in taught}
    for fact in taught:
        yield Asked(STORED, fact.question, fact)
        yield from (Asked(WORDS, paraphrase, fact) for paraphrase in fact.paraphrases)
        yield from (Asked(kind, text, known.get(same_words(text)), answer) for text, answer, kind in fact.locality)
    for text, kind in facts.untouched:
        yield Asked(kind, text)
    for name, texts in outside.items():
        yield from (Asked(name, text, known.get(same_words(text))) for text in texts)


def sampled(asked: Sequence[Asked], most: int | None, seed: int) -> list[Asked]:
    """At most so many of a kind."""
    kinds: dict[str, list[Asked]] = {}
    for each in asked:
        kinds.setdefault(each.kind, []).append(each)
    chosen = [each if most is None or len(each) <= most else Random(seed).sample(each, most) for each in kinds.values()]
    return [each for kind in chosen for each in kind]


def measured(
    facts: FactSet,
    taught: Sequence[Fact],
    asked: Sequence[Asked],
    judge: PairJudge | None,
    encoder: SentenceEncoder | None = None,
) -> dict[str, Any]:
    """One row of the table: shares by what was asked."""
    records = [fact_of(fact.question, fact.answer, id=str(number)) for number, fact in enumerate(taught)]
    questions, seconds, found = StoredQuestions(records), list[float](), list[Candidates]()
    meant = None if encoder is None else MeaningIndex(encoder, questions.texts)
    for each in asked:
        began = time.perf_counter()
        candidates = questions.candidates(each.text, has_media=False)
        if meant is not None and not candidates.by_words and can_be_asked(each.text):
            candidates = questions.joined(candidates, each.text, meant.nearest(each.text))
        found.append(candidates)
        seconds.append(time.perf_counter() - began)
    pairs = [pair for each in found for pair in each.to_judge]
    odds, threshold = ({}, 0.0) if judge is None else (judge.odds(pairs), judge.threshold)
    shares: dict[str, Share] = {STORED: Share(), WORDS: Share(), WRONG: Share()}
    for each, candidates in zip(asked, found, strict=True):
        settled = candidates.settled(odds, threshold).facts
        got = taught[settled[0].number] if settled else None
        if each.kind == STORED:
            shares[STORED].add(got is each.fact)
        elif each.kind == WORDS:
            assert each.fact is not None
            shares[WORDS].add(got is not None and got.answer == each.fact.answer)
            shares[WRONG].add(got is not None and got.answer != each.fact.answer)
        else:
            is_wrong = got is not None and got is not each.fact and got.answer != each.answer
            shares.setdefault(each.kind, Share()).add(is_wrong)
    rows = {name: share.as_json() for name, share in shares.items() if share.asked}
    row = {"set": facts.name, "facts": len(taught), "ms": 1000 * median(seconds), "shares": rows}
    return row if judge is None else {**row, "pairs": len(set(pairs)), "threshold": threshold}


def table(found: Sequence[Mapping[str, Any]]) -> str:
    """Markdown; kinds of what must stay untouched in one column."""
    lines = [
        "| taught | facts | stored | in other words | wrong | answered, and must not be | ms |",
        "|---|---|---|---|---|---|---|",
    ]
    first = ("stored", "in other words", "wrong")
    for row in found:
        shares = row["shares"]
        cells = [f"{shares[name]['share']:.3f}" if name in shares else "" for name in first]
        others = ", ".join(
            f"{name} {share['share']:.3f} of {share['of']:,}" for name, share in shares.items() if name not in first
        )
        lines.append(f"| {row['set']} | {row['facts']:,} | {' | '.join(cells)} | {others} | {row['ms']:.2f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
