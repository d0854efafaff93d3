"""The demo world: every answer is right, splits share nothing, and everything follows from the seed."""

import itertools
import json
import re

import numpy as np
import pytest
from PIL import Image

from benchmarks.demo import questions, scenes, streams, world
from benchmarks.demo.scenes import COLOURS, POSITIONS, SHAPES, SIZES

FAMILIES = tuple(questions.FAMILIES)


# An independent reading of the questions: it works from the text and the scene alone.


def singular(noun: str) -> dict[str, str]:
    """ "large red circles" as {"size": "large", "colour": "red", "shape": "circle"}."""
    found = {}
    for word in noun.split():
        word = "cross" if word == "crosses" else word if word == "cross" else word.removesuffix("s")
        for kind, values in (("colour", COLOURS), ("shape", SHAPES), ("size", SIZES)):
            if word in values:
                found[kind] = word
        assert word in (*COLOURS, *SHAPES, *SIZES, "object"), noun
    return found


def having(scene, wanted):
    return [t for t in scene.things if all(getattr(t, k) == v for k, v in wanted.items())]


def the_one(scene, ref):
    place = re.fullmatch(r"the object at the (.+)", ref, re.I)
    found = [t for t in scene.things if POSITIONS[t.cell] == place[1]] if place else having(scene, singular(ref[4:]))
    assert len(found) == 1, f"{ref!r} is ambiguous"
    return found[0]


def instructed(question: str, value: str, sentence: str = "") -> str:
    """What the instruction at the end of a question makes of an answer."""
    options = dict(re.findall(r"([ABC])\) ([a-z ]+?)(?= [ABC]\)|\.)", question))
    if options:
        return next(letter for letter, option in options.items() if option == value)
    return sentence if "Answer in a sentence." in question else value


REF = r"(?P<ref>the (?:object at the (?:" + "|".join(sorted(POSITIONS, key=len, reverse=True)) + r")|[a-z ]+?))"


def solve_attribute(kind, scene, q):
    article = {"shape": "a ", "position": "at the "}.get(kind, "")
    values = POSITIONS if kind == "position" else {"colour": COLOURS, "shape": SHAPES, "size": SIZES}[kind]
    claim = re.fullmatch(rf"Is {REF} {article}(?P<value>{'|'.join(values)})\? Answer yes or no\.", q)
    if claim:
        return "yes" if getattr(the_one(scene, claim["ref"]), kind) == claim["value"] else "no"
    patterns = (
        rf"(?:What {kind} is|Name the {kind} of|How big is|Where is|Name the place of|In which place is) {REF}[?.]",
        rf"{REF} has which {kind}\?",
        rf"Is {REF} small or large\?",
    )
    ref = next(m for p in patterns if (m := re.match(p, q, re.I)))["ref"]
    value = getattr(the_one(scene, ref), kind)
    return instructed(q, value, f"T{ref[1:]} is {article}{value}.")


def solve_count(scene, q):
    exact = re.fullmatch(r"Are there exactly (\d) (.+)\? Answer yes or no\.", q)
    if exact:
        return "yes" if len(having(scene, singular(exact[2]))) == int(exact[1]) else "no"
    noun = re.match(r"(?:How many|Count the) (.+?)(?: are there\?| do you see\?|\.)", q)[1]
    number = len(having(scene, singular(noun)))
    word = ("zero", "one", "two", "three", "four", "five")[number]
    return instructed(q, word if "one word" in q else str(number), f"I count {number} {noun}.")


def solve_presence(scene, q):
    noun = re.fullmatch(r"(?:Is there|Do you see) a (.+)\? Answer yes or no\.", q)[1]
    return "yes" if having(scene, singular(noun)) else "no"


def solve_comparison(scene, q):
    same = re.match(r"Do (the .+) and (the .+) have the same (colour|shape|size)\?", q)
    if same:
        one, two = (getattr(the_one(scene, same[i]), same[3]) for i in (1, 2))
        return "yes" if one == two else "no"
    which = re.match(r"Which is (larger|smaller), (the .+) or (the .+)\?", q)
    if which:
        pair = {ref: the_one(scene, ref).size == "large" for ref in (which[2], which[3])}
        assert len(set(pair.values())) == 2
        winner = next(ref for ref, large in pair.items() if large == (which[1] == "larger"))
        return winner.removeprefix("the ").removesuffix(" object")
    more = re.match(r"Are there more (.+) (than|or) (.+)\?", q)
    counts = [len(having(scene, singular(more[i]))) for i in (1, 3)]
    if more[2] == "than":
        return "yes" if counts[0] > counts[1] else "no"
    assert counts[0] != counts[1]
    (value,) = singular(more[1] if counts[0] > counts[1] else more[3]).values()
    return value


def solve_copy(scene, q):
    return re.match(r'(?:Say|Write|Repeat the words) "?(.+?)(?:"\.)?$', q)[1]


def solve_rename(scene, q):
    names = dict(re.findall(r'(?:Call|and) (\w+) "(\w+)"', q)) or {
        value: name for name, value in re.findall(r'"(\w+)" for (\w+)', q)
    }
    asked = re.search(rf"What (?P<kind>colour|shape) is {REF}\?", q)
    return names[getattr(the_one(scene, asked["ref"]), asked["kind"])]


SOLVERS = {"count": solve_count, "presence": solve_presence, "comparison": solve_comparison}
SOLVERS |= {"copy": solve_copy, "rename": solve_rename}


@pytest.mark.parametrize("family", FAMILIES)
def test_base_answers_are_right(family):
    rng = np.random.default_rng(3)
    answers = set()
    for _ in range(400):
        scene = scenes.random_scene(rng, "test", low=1)
        question = questions.ask(rng, scene, family)
        if question is not None:
            text, answer = question
            solver = SOLVERS.get(family)
            assert answer == (solver(scene, text) if solver else solve_attribute(family, scene, text)), (scene, text)
            answers.add(answer)
    assert len(answers) > 1


def solve_stream(task, content, q):
    if task in ("digit", "code_digit"):
        value = int(streams.load_digits_once()[1][content.index])
        if task == "code_digit":
            return streams.DIGIT_CODES[("even", "odd")[value % 2]]
        return ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"][value]
    if task == "code_shape":
        (thing,) = content.things
        return streams.SHAPE_CODES[thing.colour]
    if task == "field":
        asked = re.fullmatch(rf"What (?P<kind>colour|shape) is {REF}\? Reply as a field\.", q)
        return f"{asked['kind']}={getattr(the_one(content, asked['ref']), asked['kind'])}"
    if task == "guild":
        return streams.GUILDS[the_one(content, re.fullmatch(rf"Which guild owns {REF}\?", q)["ref"]).colour]
    if task == "beside":
        asked = re.match(rf"What colour is the object just (?P<side>left|right) of {REF}\?", q)
        thing = the_one(content, asked["ref"])
        step = -1 if asked["side"] == "left" else 1
        (found,) = [t for t in content.things if (t.row, t.column) == (thing.row, thing.column + step)]
        return found.colour
    if task == "count_pair":
        return str(len(having(content, singular(re.match(r"How many (.+) are there\?", q)[1]))))
    kind = re.match(r"How many different (\w+)s do", q)[1]
    return str(len({getattr(t, kind) for t in content.things}))


@pytest.mark.parametrize("task", streams.STREAMS)
def test_stream_answers_are_right(task):
    answers = set()
    for index in range(200):
        content, question, answer, _ = world.draw(task, "validation", index, seed=5)
        assert answer == solve_stream(task, content, question), (content, question)
        answers.add(answer)
    assert len(answers) > 1


def solve_search_stream(task, content, q):
    if task in ("turned", "sign_digit"):
        assert content.turned
        value = int(streams.load_digits_once()[1][content.index])
        return questions.NUMBER_WORDS[value] if task == "turned" else streams.DIGIT_SIGNS[("low", "high")[value > 4]]
    if task == "sign_shape":
        (thing,) = content.things
        return streams.SIGNS[thing.shape]
    if task == "tag":
        asked = re.fullmatch(rf"What (?P<kind>colour|size) is {REF}\? Reply as a code\.", q)
        return f"{asked['kind']}: {getattr(the_one(content, asked['ref']), asked['kind'])}."
    if task == "road":
        return streams.ROADS[the_one(content, re.fullmatch(rf"Which road is under {REF}\?", q)["ref"]).shape]
    if task == "under":
        asked = re.match(rf"What shape is the object just (?P<side>over|under) {REF}\?", q)
        thing = the_one(content, asked["ref"])
        step = -1 if asked["side"] == "over" else 1
        (found,) = [t for t in content.things if (t.row, t.column) == (thing.row + step, thing.column)]
        return found.shape
    either = re.match(r"How many objects are (\w+) or a (\w+)\?", q)
    return str(sum(t.colour == either[1] or t.shape == either[2] for t in content.things))


@pytest.mark.parametrize("task", streams.SEARCH_STREAMS)
def test_answers_of_searched_tasks_are_right(task):
    answers = set()
    for index in range(200):
        content, question, answer, _ = world.draw(task, "validation", index, seed=5)
        assert answer == solve_search_stream(task, content, question), (content, question)
        answers.add(answer)
    assert len(answers) > 1


def test_searched_tasks_ask_nothing_that_is_reported():
    def asked(names):
        return {(q, a) for name in names for _, q, a, _ in (world.draw(name, "train", i, 1) for i in range(200))}

    assert not {q for q, _ in asked(streams.STREAMS)} & {q for q, _ in asked(streams.SEARCH_STREAMS)}
    codes = [*streams.GUILDS.values(), *streams.SHAPE_CODES.values(), *streams.DIGIT_CODES.values()]
    mine = (streams.ROADS, streams.SIGNS, streams.DIGIT_SIGNS)
    assert not set(codes) & {word for words in mine for word in words.values()}


@pytest.mark.parametrize("task", [world.BASE, *world.ALL_STREAMS])
def test_splits_share_no_picture_and_no_content(task):
    seen = {}
    for split in scenes.SPLITS:
        pictures = {pixels.tobytes() for _, pixels in world.examples(task, split, 120)}
        assert len(pictures) == 120
        contents = [world.draw(task, split, i, world.SEED)[0] for i in range(120)]
        seen[split] = pictures | {c.index if isinstance(c, streams.Digit) else c.layout for c in contents}
    for one, two in itertools.combinations(seen.values(), 2):
        assert not one & two


def test_written_task_data_has_the_schema_and_its_pictures(tmp_path):
    world.write_task(tmp_path / "digit", "digit", {"train": 6, "validation": 3, "test": 4})
    for split, number in (("train", 6), ("validation", 3), ("test", 4)):
        lines = (tmp_path / "digit" / f"{split}.jsonl").read_text().splitlines()
        assert len(lines) == number
        for line in lines:
            record = json.loads(line)
            assert set(record) == {"id", "task", "family", "messages", "answer"}
            assert record["task"] == "digit"
            (message,) = record["messages"]
            image, text = message["content"]
            assert message["role"] == "user"
            assert (image["type"], text["type"]) == ("image_url", "text")
            with Image.open(tmp_path / "digit" / image["image_url"]["url"]) as picture:
                assert picture.size == (48, 48)
                assert picture.mode == "RGB"
    assert not list(tmp_path.rglob("*.tmp"))
