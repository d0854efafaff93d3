"""Measures the demo model, untouched: `python -m benchmarks.demo.evaluate [--model DIR] [--out JSON]`.

Prints accuracy on held-out base questions, overall and by family, and on every stream task. Greedy decoding, one
question a prompt, exact match after lower-casing and dropping final punctuation.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor

from benchmarks.chat import same_answer
from benchmarks.demo.world import BASE, SEED, TASKS, examples
from benchmarks.record import keep, parser_of
from server.demo import CHECKPOINT

Example = tuple[dict, np.ndarray]


class Answerer:
    """Greedy answers of a checkpoint in transformers, in float32, a batch at a time."""

    def __init__(self, model: str | Path) -> None:
        self.model = AutoModelForImageTextToText.from_pretrained(model).eval()
        self.processor = AutoProcessor.from_pretrained(model)

    @torch.no_grad()
    def __call__(self, batch: Sequence[Example], max_new_tokens: int = 20) -> list[str]:
        template = self.processor.tokenizer.apply_chat_template
        prompts = [template(r["messages"], add_generation_prompt=True, tokenize=False) for r, _ in batch]
        images = [Image.fromarray(pixels) for _, pixels in batch]
        inputs = self.processor(images=images, text=prompts, padding=True, return_tensors="pt")
        tokens = self.model.generate(**inputs, do_sample=False, max_new_tokens=max_new_tokens)
        return self.processor.batch_decode(tokens[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def accuracy(answerer: Answerer, batch: Sequence[Example], size: int = 64) -> list[tuple[str, bool]]:
    """(family, right) of every example."""
    answers = [answer for start in range(0, len(batch), size) for answer in answerer(batch[start : start + size])]
    pairs = zip(batch, answers, strict=True)
    return [(record["family"], same_answer(answer, record["answer"])) for (record, _), answer in pairs]


def measure(model: str | Path, base: int, stream: int, seed: int = SEED, split: str = "test") -> dict:
    answerer = Answerer(model)
    numbers = {task: base if task == BASE else stream for task in TASKS}
    scored = {task: accuracy(answerer, list(examples(task, split, n, seed))) for task, n in numbers.items()}
    of_base = scored.pop(BASE)
    by_family: dict[str, list[bool]] = defaultdict(list)
    for family, right in of_base:
        by_family[family].append(right)
    frozen = {task: _share([right for _, right in answered]) for task, answered in scored.items()}
    return {
        "split": split,
        "seed": seed,
        "base": {"questions": len(of_base), "accuracy": _share([right for _, right in of_base])},
        "base_families": {family: _share(rights) for family, rights in by_family.items()},
        "streams": {"questions_each": stream, "frozen_accuracy": frozen},
    }


def _share(rights: Sequence[bool]) -> float:
    return round(float(np.mean(rights)), 4)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--model", default=str(CHECKPOINT))
    parser.add_argument("--base", type=int, default=2700, help="held-out base questions, evenly over the families")
    parser.add_argument("--stream", type=int, default=256, help="test questions of each stream task")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    keep(measure(args.model, args.base, args.stream), args.output)


if __name__ == "__main__":
    main()
