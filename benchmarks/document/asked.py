"""What is asked about a document, how a row answers it, and what share of the in-context gain that is.

Held-out questions are those that the model asked in another self-study, and the document's own sentences with another
word left out, or cut at another place: none of them is a training question, though the sentences are the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, Final

import torch
from torch import Tensor

from inducekv_vllm.backbone.turns import message
from inducekv_vllm.bundle.source import source_digest_of
from selector.backbone.scoring import Scorer
from selector.data.document import Document
from selector.data.examples import Example
from selector.document.kinds import BLANK, clozes, continuations
from selector.document.study import Studied
from selector.document.teacher import Lesson

NO_LESSON: Final = Lesson(torch.zeros(0, 0), torch.zeros(0, 0))  # their answers are the document's own words
GROUPS: Final = {"questions": ("question", "use", "summary"), "cloze": ("cloze",), "continuations": ("continuation",)}


@dataclass(frozen=True)
class HeldOut:
    """Questions of each group, and the places of the missing word in the answers of clozes."""

    questions: Mapping[str, Sequence[Studied]]

    @classmethod
    def of(
        cls,
        document: Document,
        pieces: Sequence[str],
        studied: Sequence[Studied],
        asked: Sequence[Studied],
        most: int,
    ) -> HeldOut:
        """At most `most` of each group, and none of them one of `studied`.

        Args:
            studied: of the self-study.
            asked: of another one, of which the model's own questions are taken.
        """
        known, rng = {each.example.source_digest for each in studied}, Random("held out")
        fresh = [each for each in asked if each.example.source_digest not in known]
        known |= {each.example.source_digest for each in fresh}
        found = {group: [each for each in fresh if each.kind in kinds] for group, kinds in GROUPS.items()}
        for number, piece in enumerate(pieces):
            for group, make in (("cloze", clozes), ("continuations", continuations)):
                for made in make(piece, document.name, most, rng):
                    digest = source_digest_of((message("user", made.text),), [])
                    example = Example(
                        f"{group}/{number}", document.name, (message("user", made.text),), (), made.answer, digest
                    )
                    if digest not in known:
                        known.add(digest)
                        found[group].append(Studied(example, NO_LESSON, made.kind, made.missing, made.exact, False))
        return cls({group: rng.sample(all_of, min(most, len(all_of))) for group, all_of in found.items()})

    @property
    def examples(self) -> list[Example]:
        return [each.example for of_group in self.questions.values() for each in of_group]

    def measured(self, scorer: Scorer, logprobs: Sequence[Tensor]) -> dict[str, Any]:
        """By group, the summed NLL of the answers, and the share of missing words that are the likeliest.

        Small models repeat the blank. `filled` is the share if they may not.

        Args:
            logprobs: of each of `examples`, [a, vocabulary].
        """
        found: dict[str, Any] = {}
        rest, blanks = iter(logprobs), blank_tokens(scorer)
        for group, of_group in self.questions.items():
            nll, right, filled = 0.0, 0, 0
            for each in of_group:
                rows, answer = next(rest), torch.tensor(scorer.answer_tokens(each.example))
                nll -= float(rows.gather(1, answer[:, None]).sum())
                if group == "cloze":
                    places = missing_places(scorer, each)
                    right += bool((rows.argmax(-1)[places] == answer[places]).all())
                    no_blanks = rows[places].index_fill(1, blanks, -torch.inf)
                    filled += bool((no_blanks.argmax(-1) == answer[places]).all())
            found[group] = {"questions": len(of_group), "nll": nll / max(1, len(of_group))}
            if group == "cloze":
                found[group] |= {"right": right / max(1, len(of_group)), "filled": filled / max(1, len(of_group))}
        return found


def blank_tokens(scorer: Scorer) -> Tensor:
    """The tokens that a blank can be made of: [n] int64."""
    tokenizer = scorer.backbone.tokenizer
    with_blank = [token for piece, token in tokenizer.get_vocab().items() if BLANK[0] in piece]
    blank = [token for token in with_blank if not tokenizer.decode([token]).strip(f" .{BLANK[0]}")]
    return torch.tensor(blank, dtype=torch.int64)


def missing_places(scorer: Scorer, cloze: Studied) -> slice:
    """Where the missing word stands among the tokens of a cloze's answer, which is the whole sentence."""
    text = cloze.example.messages[0]["content"][0]["text"]
    before = text.partition(" fill in the blank: ")[2].partition(BLANK)[0]
    tokenizer = scorer.backbone.tokenizer
    offsets = tokenizer(cloze.example.answer, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    begin, end = len(before), len(before) + len(cloze.missing)
    inside = [number for number, (start, stop) in enumerate(offsets) if start < end and stop > begin]
    return slice(inside[0], inside[-1] + 1)


def beside(text: str, example: Example) -> Example:
    """The question behind a text."""
    messages = (message("user", f"{text}\n\n{example.messages[0]['content'][0]['text']}"),)
    digest = source_digest_of(messages, [])
    return Example(
        id=example.id, task=example.task, messages=messages, images=(), answer=example.answer, source_digest=digest
    )


def recovered(found: Mapping[str, Any], without: Mapping[str, Any], in_prompt: Mapping[str, Any]) -> dict[str, float]:
    """By group, (NLL without - NLL with) over the same for the document in the prompt; empty where that has no gain."""
    shares = {}
    for group, of_group in found.items():
        gain = without[group]["nll"] - in_prompt[group]["nll"]
        if gain > 0:
            shares[group] = (without[group]["nll"] - of_group["nll"]) / gain
    return shares
