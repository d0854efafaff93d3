"""The paper's extracted entries with answers in them: are they the prompt without its cost?

    python -m benchmarks.research.facts.extracted [--questions N] [--output FILE]

SmolLM2, the three tasks of facts of its real-text stream, their training examples stored and their test questions
asked. The k stored questions that words find (see `inducekv_vllm.facts`) are given to the frozen model in two ways:

    entries    keys and values of each token of question and answer, from a pass over the two alone, neither pooled nor
               trained, injected by merged attention: keys without positions, as a bundle stores them
    prompt     the same questions and answers as earlier turns (PromptReplay)

Prints a table in Markdown: the share of answers that are right, tokens of the prompt, and bytes stored for an example.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from benchmarks.chat import same_answer
from benchmarks.machine import describe_machine
from benchmarks.real.model import cache_folder, model_folder
from benchmarks.research.continual.suites import TaskData, load_suite
from benchmarks.research.facts.families import ANOTHER
from inducekv_vllm.backbone.footprint import FLOAT16_BYTES
from inducekv_vllm.backbone.turns import message, turn_marks
from inducekv_vllm.facts import QuestionIndex, words_of
from inducekv_vllm.gate import deciding_tokens
from selector.backbone.extraction import extract
from selector.backbone.facts import fact_reader
from selector.backbone.generation import generate
from selector.backbone.injection import TensorMemory, Terms
from selector.backbone.model import Backbone, Inputs
from selector.data.examples import Example
from selector.gate.variations import text_of

RESULTS: Final = Path(__file__).parents[2] / "results" / "facts_extracted.json"
STORED, QUESTIONS, LONGEST = 128, 24, 12  # examples, questions of a task, tokens of an answer
SHOWN: Final = (1, 4, 8)  # k
AT_ONCE: Final = 12


@dataclass(frozen=True, eq=False)
class Entries:
    """The tokens of N stored examples, one after the other, as entries of one token."""

    memory: TensorMemory
    places: list[range]  # of each example's tokens

    @classmethod
    def of(cls, backbone: Backbone, examples: Sequence[Example]) -> Entries:
        keys, values, places, end = list[Tensor](), list[Tensor](), list[range](), 0
        marks = turn_marks(backbone.processor)
        for example in examples:
            answered = with_answer(example)
            tokens = backbone.encode(answered.messages, [])["input_ids"][0].tolist()
            own = slice(deciding_tokens(tokens, marks, ()).text[0], len(tokens))  # without the system prompt
            found = extract(backbone, [answered], len(tokens))  # as many segments as tokens: each is one
            keys.append(found.payload_keys[:, 0, :, own])  # [L, J, t, D]
            values.append(found.payload_values[:, 0, :, own])
            places.append(range(end, end + keys[-1].shape[2]))
            end = places[-1].stop
        payload = [torch.cat(each, dim=2).transpose(1, 2).unsqueeze(3) for each in (keys, values)]  # [L, B, J, 1, D]
        memory = TensorMemory(
            retrieval_keys=torch.zeros(end, backbone.hidden_size),
            payload_keys=payload[0],
            payload_values=payload[1],
            temperature=torch.tensor(1.0),
            value_gates=torch.ones(backbone.num_layers),
            layer_bias=torch.zeros(backbone.num_layers),
            weighting="uniform",
            form="merged",
            map_in=None,
            map_out=None,
        )
        return cls(memory, places)

    def terms(self, chosen: Sequence[Sequence[int]]) -> Terms:
        """That n requests read the tokens of these examples alone."""
        prior = torch.full((len(chosen), len(self.memory.retrieval_keys)), -math.inf)
        for row, examples in enumerate(chosen):
            for example in examples:
                prior[row, list(self.places[example])] = 0.0
        return self.memory.terms(torch.zeros(len(chosen), self.memory.retrieval_keys.shape[1]), log_prior=prior)

    @property
    def bytes_each(self) -> float:
        payload = self.memory.payload_keys.numel() + self.memory.payload_values.numel()
        return payload * FLOAT16_BYTES / len(self.places)


def with_answer(example: Example) -> Example:
    return replace(example, messages=(*example.messages, message("assistant", example.answer)))


def measured(backbone: Backbone, task: TaskData, num_questions: int) -> list[dict[str, Any]]:
    stored, asked = task.train[:STORED], task.test[:num_questions]
    index = QuestionIndex(
        [words_of(text_of(each.messages)) for each in stored],
        [each.answer for each in stored],
        fact_reader(backbone).vectors,
    )
    nearest = [index.search(words_of(text_of(each.messages)))[0].tolist() for each in asked]
    entries = Entries.of(backbone, stored)
    rows = []
    for k in SHOWN:
        chosen = [found[:k] for found in nearest]
        replayed = [
            [*(turn for place in reversed(places) for turn in with_answer(stored[place]).messages), *each.messages]
            for places, each in zip(chosen, asked, strict=True)
        ]
        plain = [backbone.encode(each.messages, []) for each in asked]
        shown = [backbone.encode(each, []) for each in replayed]
        rows += [
            row(backbone, task.name, k, "entries", plain, asked, entries.bytes_each, entries, chosen),
            row(backbone, task.name, k, "prompt", shown, asked, text_bytes(stored)),
        ]
        print(rows[-2:], file=sys.stderr)
    return rows


def row(
    backbone: Backbone,
    task: str,
    k: int,
    way: str,
    prompts: Sequence[Inputs],
    asked: Sequence[Example],
    bytes_each: float,
    entries: Entries | None = None,
    chosen: Sequence[Sequence[int]] = (),
) -> dict[str, Any]:
    right = 0
    for start in range(0, len(prompts), AT_ONCE):
        part = slice(start, start + AT_ONCE)
        injection = () if entries is None else (entries.memory, entries.terms(chosen[part]))
        for found, each in zip(generate(backbone, prompts[part], LONGEST, *injection), asked[part], strict=True):
            text = backbone.tokenizer.decode(found.token_ids, skip_special_tokens=True)
            right += same_answer(text, each.answer)
    tokens = sum(prompt["input_ids"].shape[1] for prompt in prompts) / len(prompts)
    return {"task": task, "k": k, "way": way, "right": right / len(asked), "tokens": tokens, "bytes": bytes_each}


def text_bytes(examples: Sequence[Example]) -> float:
    return sum(len((text_of(each.messages) + each.answer).encode()) for each in examples) / len(examples)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--questions", type=int, default=QUESTIONS, help="of each task")
    parser.add_argument("--output", type=Path, default=RESULTS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    backbone = Backbone.load(model_folder())
    suite = load_suite("real-text", cache_folder() / "gate-data" / "real-text")
    rows = [r for task in suite.tasks if task.name in ANOTHER for r in measured(backbone, task, args.questions)]
    print("| task | k | entries | prompt | tokens | tokens, prompt | bytes | bytes, prompt |\n|" + "---|" * 8)
    for entries, prompt in zip(rows[::2], rows[1::2], strict=True):
        print(
            f"| {entries['task']} | {entries['k']} | {entries['right']:.3f} | {prompt['right']:.3f} | "
            f"{entries['tokens']:.0f} | {prompt['tokens']:.0f} | {entries['bytes']:.0f} | {prompt['bytes']:.0f} |"
        )
    args.output.write_text(json.dumps({"machine": describe_machine(), "rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
