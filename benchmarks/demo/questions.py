"""The base families: what the demo model is trained to answer.

Every family is a function `(rng, scene) -> (question, answer) | None`; None: this scene offers no such question.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations

import numpy as np

from benchmarks.demo.scenes import COLOURS, POSITIONS, SHAPES, SIZES, Scene, Thing

Question = tuple[str, str]
NUMBER_WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
LETTERS = ("A", "B", "C")
_CODE_WORDS = """
zorp blick dax wug fep toma gorp kiki lumo nerf pako quib rinsa skiv tulgo vemp wint yash zuli brap clom
drey flim grot
"""
CODE_WORDS = tuple(_CODE_WORDS.split())
_FILLER_WORDS = """
apple house river stone cloud table chair music paper water light night garden horse bird fish tree road
ship wind fire snow rain moon star sun hand foot book door glass bread north south east west odd even
true false left over under near far hot cold fast slow old new good bad first last open shut answer code
picture digit guild owns reply field different beside shown this
"""
FILLER_WORDS = tuple(_FILLER_WORDS.split())
ATTRIBUTES = {"colour": tuple(COLOURS), "shape": SHAPES, "size": SIZES}


def pick(rng: np.random.Generator, options):
    """One of `options`, kept in its own type (`rng.choice` would turn strings into numpy's)."""
    return options[int(rng.integers(len(options)))]


def phrase(attributes: dict[str, str], noun: str = "object") -> str:
    """`{"size": "large", "colour": "red"}` as "large red object"."""
    words = [attributes[a] for a in ("size", "colour") if a in attributes]
    return " ".join([*words, attributes.get("shape", noun)])


def matching(scene: Scene, attributes: dict[str, str]) -> list[Thing]:
    return [t for t in scene.things if all(getattr(t, a) == v for a, v in attributes.items())]


def reference(rng: np.random.Generator, scene: Scene, thing: Thing, hide: str) -> str | None:
    """A description of `thing` that fits nothing else in the scene and does not name its attribute `hide`."""
    options = []
    visible = [a for a in ATTRIBUTES if a != hide]
    for length in range(1, len(visible) + 1):
        for names in combinations(visible, length):
            attributes = {a: getattr(thing, a) for a in names}
            if len(matching(scene, attributes)) == 1:
                options.append("the " + phrase(attributes))
    if hide != "position" and (not options or rng.random() < 0.25):
        return f"the object at the {thing.position}"
    return pick(rng, options) if options else None


def choices(rng: np.random.Generator, answer: str, values) -> tuple[str, str]:
    """Three options, the right one among them, and its letter."""
    others = [v for v in values if v != answer]
    options = [answer] + [others[int(i)] for i in rng.permutation(len(others))[: len(LETTERS) - 1]]
    options = [options[int(i)] for i in rng.permutation(len(options))]
    listed = " ".join(f"{letter}) {option}" for letter, option in zip(LETTERS, options, strict=False))
    return f"Options: {listed}. Answer with the letter.", LETTERS[options.index(answer)]


def _attribute(kind: str, templates: tuple[str, ...], article: str = "") -> Callable:
    def make(rng: np.random.Generator, scene: Scene) -> Question | None:
        thing = pick(rng, scene.things)
        ref = reference(rng, scene, thing, hide=kind)
        if ref is None:
            return None
        values = POSITIONS if kind == "position" else ATTRIBUTES[kind]
        value = getattr(thing, kind)
        style = pick(rng, ("plain", "short", "sentence", "letter", "yes/no"))
        if style == "yes/no":
            claim = value if rng.random() < 0.5 else pick(rng, [v for v in values if v != value])
            return f"Is {ref} {article}{claim}? Answer yes or no.", "yes" if claim == value else "no"
        question = pick(rng, templates).format(ref=ref)
        question = question[0].upper() + question[1:]
        if style == "plain":
            return question, value
        if style == "short":
            return f"{question} {'Answer briefly.' if kind == 'position' else 'Answer with one word.'}", value
        if style == "sentence":
            return f"{question} Answer in a sentence.", f"{ref[0].upper()}{ref[1:]} is {article}{value}."
        listed, letter = choices(rng, value, values)
        return f"{question} {listed}", letter

    return make


def count(rng: np.random.Generator, scene: Scene) -> Question:
    kind = pick(rng, ("all", "colour", "colour", "shape", "shape", "size"))
    if kind == "all":
        attributes = {}
    else:
        present = [getattr(t, kind) for t in scene.things]
        # Values in the picture are asked for by frequency, so that larger counts are not rare.
        attributes = {kind: pick(rng, present) if rng.random() < 0.8 else pick(rng, ATTRIBUTES[kind])}
    number = len(matching(scene, attributes))
    noun = phrase(attributes) + ("es" if attributes.get("shape") == "cross" else "s")
    style = pick(rng, ("plain", "number", "word", "sentence", "yes/no"))
    if style == "yes/no":
        claim = number if rng.random() < 0.5 else pick(rng, [n for n in range(6) if n != number])
        return f"Are there exactly {claim} {noun}? Answer yes or no.", "yes" if claim == number else "no"
    question = pick(rng, ("How many {n} are there?", "How many {n} do you see?", "Count the {n}.")).format(n=noun)
    if style == "plain":
        return question, str(number)
    if style == "number":
        return f"{question} Answer with a number.", str(number)
    if style == "word":
        return f"{question} Answer with one word.", NUMBER_WORDS[number]
    return f"{question} Answer in a sentence.", f"I count {number} {noun}."


def presence(rng: np.random.Generator, scene: Scene) -> Question:
    names = pick(rng, (("colour",), ("shape",), ("colour", "shape"), ("colour", "shape"), ("size", "shape")))
    thing = pick(rng, scene.things)
    attributes = {a: getattr(thing, a) for a in names}
    if rng.random() < 0.75:
        changed = pick(rng, names)
        attributes[changed] = pick(rng, ATTRIBUTES[changed])
    question = pick(rng, ("Is there a {n}?", "Do you see a {n}?")).format(n=phrase(attributes))
    return f"{question} Answer yes or no.", "yes" if matching(scene, attributes) else "no"


def comparison(rng: np.random.Generator, scene: Scene) -> Question | None:
    question = pick(rng, (_same, _bigger, _more))(rng, scene)
    if question is not None and question[1] == "no" and rng.random() < 0.45:
        return None  # "no" would be nearly twice as common as "yes"
    return question


def _pair(rng: np.random.Generator, scene: Scene, kind: str) -> tuple[Thing, Thing] | None:
    """Two objects, each the only one with its value of attribute `kind`."""
    alone = [t for t in scene.things if len(matching(scene, {kind: getattr(t, kind)})) == 1]
    if len(alone) < 2:
        return None
    first, second = rng.permutation(len(alone))[:2]
    return alone[int(first)], alone[int(second)]


def _same(rng: np.random.Generator, scene: Scene) -> Question | None:
    by = pick(rng, ("colour", "shape"))
    pair = _pair(rng, scene, by)
    if pair is None:
        return None
    what = pick(rng, [a for a in ATTRIBUTES if a != by])
    one, two = (phrase({by: getattr(t, by)}) for t in pair)
    question = f"Do the {one} and the {two} have the same {what}? Answer yes or no."
    return question, "yes" if getattr(pair[0], what) == getattr(pair[1], what) else "no"


def _bigger(rng: np.random.Generator, scene: Scene) -> Question | None:
    by = pick(rng, ("colour", "shape"))
    pair = _pair(rng, scene, by)
    if pair is None or pair[0].size == pair[1].size:
        return None
    one, two = (phrase({by: getattr(t, by)}) for t in pair)
    larger = pick(rng, (True, False))
    winner = next(t for t in pair if (t.size == "large") == larger)
    word = "larger" if larger else "smaller"
    question = f"Which is {word}, the {one} or the {two}?"
    return pick(rng, (question, f"{question} Answer with one word.")), getattr(winner, by)


def _more(rng: np.random.Generator, scene: Scene) -> Question | None:
    by = pick(rng, ("colour", "shape"))
    present = sorted({getattr(t, by) for t in scene.things})
    if len(present) < 2:
        return None
    first, second = (present[int(i)] for i in rng.permutation(len(present))[:2])
    one, two = (len(matching(scene, {by: v})) for v in (first, second))
    nouns = [phrase({by: v}) + ("es" if v == "cross" else "s") for v in (first, second)]
    if one != two and rng.random() < 0.5:
        question = f"Are there more {nouns[0]} or {nouns[1]}?"
        return pick(rng, (question, f"{question} Answer with one word.")), first if one > two else second
    return f"Are there more {nouns[0]} than {nouns[1]}? Answer yes or no.", "yes" if one > two else "no"


def copy(rng: np.random.Generator, scene: Scene) -> Question:
    """Says any word of the vocabulary, so that every word is an output the model knows how to give."""
    items = [pick(rng, COPY_WORDS) for _ in range(pick(rng, (1, 1, 1, 2, 3)))]
    text = pick(rng, (" ", " ", ": ", ", ", "=")).join(items)
    return pick(rng, ('Say "{t}".', 'Write "{t}".', "Repeat the words {t}", "Say {t}")).format(t=text), text


def rename(rng: np.random.Generator, scene: Scene) -> Question | None:
    """Gives two values new names in the question and asks for one of them."""
    kind = pick(rng, ("colour", "shape"))
    thing = pick(rng, scene.things)
    ref = reference(rng, scene, thing, hide=kind)
    if ref is None:
        return None
    value = getattr(thing, kind)
    other = pick(rng, [v for v in ATTRIBUTES[kind] if v != value])
    names = [pick(rng, COPY_WORDS), pick(rng, COPY_WORDS)]
    if names[0] == names[1]:
        return None
    table = list(zip((value, other), names, strict=True))
    (a, x), (b, y) = table if rng.random() < 0.5 else table[::-1]
    question = f"What {kind} is {ref}?"
    template = pick(rng, ('Call {a} "{x}" and {b} "{y}". {q}', '{q} Say "{x}" for {a} and "{y}" for {b}.'))
    return template.format(a=a, x=x, b=b, y=y, q=question), names[0]


FAMILIES: dict[str, Callable[[np.random.Generator, Scene], Question | None]] = {
    "colour": _attribute("colour", ("What colour is {ref}?", "Name the colour of {ref}.", "{ref} has which colour?")),
    "shape": _attribute("shape", ("What shape is {ref}?", "Name the shape of {ref}.", "{ref} has which shape?"), "a "),
    "size": _attribute("size", ("What size is {ref}?", "How big is {ref}?", "Is {ref} small or large?")),
    "position": _attribute(
        "position", ("Where is {ref}?", "Name the place of {ref}.", "In which place is {ref}?"), "at the "
    ),
    "count": count,
    "presence": presence,
    "comparison": comparison,
    "copy": copy,
    "rename": rename,
}

COPY_WORDS: tuple[str, ...] = tuple(
    sorted(
        {w for p in (*COLOURS, *SHAPES, *SIZES, *POSITIONS) for w in p.split()}
        | {*NUMBER_WORDS, *CODE_WORDS, *FILLER_WORDS, *ATTRIBUTES}
        | {"position", "count", "yes", "no", "object", "objects", *"0123456789ABCDEF"}
    )
)


def ask(rng: np.random.Generator, scene: Scene, family: str) -> Question | None:
    """A question of the family about the scene, or None after a few tries."""
    for _ in range(8):
        question = FAMILIES[family](rng, scene)
        if question is not None:
            return question
    return None
