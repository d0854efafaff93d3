"""What is asked about a document, how a row answers it, and what share of the in-context gain that is.

Held-out questions come from a self-study with another seed: none of them is a training question.
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
from selector.data.examples import Example
from selector.document.study import Studied

GROUPS: Final = {"questions": ("question", "use", "summary"), "cloze": ("cloze",), "continuations": ("continuation",)}


@dataclass(frozen=True)
class HeldOut:
    """Questions of each group, and the places of the missing word in the answers of clozes."""

    questions: Mapping[str, Sequence[Studied]]

    @classmethod
    def of(cls, studied: Sequence[Studied], trained: Sequence[Studied], most: int, seed: int) -> HeldOut:
        """At most `most` of each group, and none that was trained."""
        known = {each.example.source_digest for each in trained}
        rng, chosen = Random(f"held out {seed}"), {}
        for group, kinds in GROUPS.items():
            new = [each for each in studied if each.kind in kinds and each.example.source_digest not in known]
            chosen[group] = rng.sample(new, min(most, len(new)))
        return cls(chosen)

    @property
    def examples(self) -> list[Example]:
        return [each.example for of_group in self.questions.values() for each in of_group]

    def measured(self, scorer: Scorer, logprobs: Sequence[Tensor]) -> dict[str, Any]:
        """By group, the summed NLL of the answers, and the share of missing words that are the likeliest.

        Args:
            logprobs: of each of `examples`, [a, vocabulary].
        """
        found: dict[str, Any] = {}
        rest = iter(logprobs)
        for group, of_group in self.questions.items():
            nll, right = 0.0, 0
            for each in of_group:
                rows, answer = next(rest), torch.tensor(scorer.answer_tokens(each.example))
                nll -= float(rows.gather(1, answer[:, None]).sum())
                if group == "cloze":
                    places = missing_places(scorer, each)
                    right += bool((rows.argmax(-1)[places] == answer[places]).all())
            found[group] = {"questions": len(of_group), "nll": nll / max(1, len(of_group))}
            if group == "cloze":
                found[group]["right"] = right / max(1, len(of_group))
        return found


def missing_places(scorer: Scorer, cloze: Studied) -> slice:
    """Where the missing word stands among the tokens of a cloze's answer, which is the whole sentence."""
    text = cloze.example.messages[0]["content"][0]["text"]
    before = text.partition('": ')[2].partition("____")[0]
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
