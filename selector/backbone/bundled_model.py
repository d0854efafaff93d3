"""A model with a bundle, as a server runs it: gate, retrieval and injection together, in transformers.

Shapes: n questions, B entries, d hidden size, H evidence of a question for a gate.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from inducekv_vllm.backbone.fact_reader import AskedQuestion
from inducekv_vllm.backbone.stored_facts import StoredAnswers, StoredQuestions
from inducekv_vllm.bundle import Bundle
from inducekv_vllm.facts import AskedFacts, FactFound, FactMissed
from inducekv_vllm.files.picture import decoded, digest_of, joined

from ..data.examples import Example
from ..runtime.progress import track
from .gate_rule import fact_tasks, routed_tasks, routing
from .generation import generate
from .injection import TensorMemory, Terms
from .judging import BackboneJudge
from .model import Backbone, Inputs
from .scoring import Scorer
from .token_values import evidence_of


@dataclass(frozen=True)
class BundledModel:
    """A frozen model with a bundle, or without one."""

    scorer: Scorer
    bundle: Bundle | None
    judge: BackboneJudge | None = None  # of facts in other words; None: words alone find them
    _evidence: dict[str, Tensor] = field(default_factory=dict, repr=False, compare=False)  # [H] by source digest

    @property
    def backbone(self) -> Backbone:
        return self.scorer.backbone

    @cached_property
    def memory(self) -> TensorMemory | None:
        return None if self.bundle is None else TensorMemory.from_bundle(self.bundle, device=self.backbone.device)

    @cached_property
    def facts(self) -> StoredAnswers | None:
        if self.bundle is None or not self.bundle.metadata.facts:
            return None
        return StoredAnswers(self.bundle.metadata, self.backbone.fact_reader)

    @cached_property
    def _questions(self) -> StoredQuestions:
        assert self.bundle is not None
        return StoredQuestions(self.bundle.metadata.facts, self.bundle.metadata.gate_tasks)

    def evidence(self, examples: Sequence[Example]) -> Tensor:
        """What the bundle's gate finds in n questions: [n, H] float32; [n, 0] without a gate."""
        if self.bundle is None or (gate := self.bundle.gate) is None:
            return torch.zeros(len(examples), 0)
        new = {e.source_digest: e for e in examples if e.source_digest not in self._evidence}
        found = evidence_of(self.backbone, gate, list(new.values()))
        self._evidence.update(zip(new, found, strict=True))
        known = [self._evidence[example.source_digest] for example in examples]
        return torch.stack(known) if known else found

    def routing(self, examples: Sequence[Example]) -> tuple[Tensor, Tensor]:
        """Whether each of n questions gets memory, [n] bool, and the prior of its entries, [n, B] float32."""
        if self.bundle is None:
            return torch.zeros(len(examples), dtype=torch.bool), torch.zeros(len(examples), 0)
        return routing(self.bundle, self.evidence(examples))

    @torch.no_grad()
    def mean_loss(self, examples: Sequence[Example], keys: Tensor) -> float:
        """Mean NLL of the examples' answers. Raises as `Scorer.losses` does.

        Args:
            keys: [n, d], what `Backbone.retrieval_keys` gives.
        """
        opened, prior = self.routing(examples)
        total = torch.zeros((), dtype=torch.float64)
        for with_memory, rows in self._batches(opened):
            chosen = [examples[row] for row in rows]
            injection = self._injection(chosen, keys[rows], prior[rows], with_memory)
            total += self.scorer.losses(chosen, *injection).double().sum().cpu()
        return float(total) / len(examples)

    def accuracy(self, examples: Sequence[Example], keys: Tensor) -> float:
        """The share of greedy answers that match exactly. `keys` [n, d] as in `mean_loss`."""
        longest = max(1, *(len(self.scorer.answer_tokens(example)) for example in examples))
        right = 0
        opened, prior = self.routing(examples)
        for with_memory, rows in self._batches(opened):
            chosen = [examples[row] for row in rows]
            texts = self._generate(chosen, keys[rows], prior[rows], with_memory, longest)
            right += sum(text == each.answer.strip() for text, each in zip(texts, chosen, strict=True))
        return right / len(examples)

    def answers(self, examples: Sequence[Example], max_new_tokens: int, *, progress: bool = False) -> list[str]:
        """The text of the greedy answer to each example."""
        texts, title = [""] * len(examples), f"Answering {'without' if self.bundle is None else 'with'} memory"
        for start in track(range(0, len(examples), self.scorer.batch_size), title, progress):
            part = examples[start : start + self.scorer.batch_size]
            opened, prior = self.routing(part)
            keys = torch.zeros(len(part), self.backbone.hidden_size)
            if opened.any():
                keys = self.backbone.retrieval_keys(self.backbone.collate([self.scorer.prefix(e) for e in part]))
            for with_memory, rows in self._batches(opened):
                answers = self._generate(
                    [part[row] for row in rows], keys[rows], prior[rows], with_memory, max_new_tokens
                )
                for row, text in zip(rows, answers, strict=True):
                    texts[start + row] = text
        return texts

    def _batches(self, opened: Tensor) -> list[tuple[bool, list[int]]]:
        """Rows that are answered together: those with memory, then those without."""
        size, batches = self.scorer.batch_size, []
        for with_memory in (True, False):
            rows = (opened == with_memory).nonzero()[:, 0].tolist()
            batches += [(with_memory, rows[at : at + size]) for at in range(0, len(rows), size)]
        return batches

    def _injection(
        self, examples: Sequence[Example], keys: Tensor, prior: Tensor, with_memory: bool
    ) -> tuple[TensorMemory | None, Terms | None]:
        """The memory and the terms of n questions for which the gate decides alike, or neither."""
        if not with_memory or self.memory is None or self.bundle is None:
            return None, None
        terms = self.memory.terms(keys, log_prior=prior.to(self.backbone.device))
        if self.memory.form == "decoupled":
            activations = [self.bundle.metadata.activation_of(task) for task in routed_tasks(self.bundle, prior)]
            terms = replace(terms, first_active=self.scorer.first_active(examples, activations))
        return self.memory, terms

    def _generate(
        self, examples: Sequence[Example], keys: Tensor, prior: Tensor, with_memory: bool, max_new_tokens: int
    ) -> list[str]:
        prompts = [self.scorer.prefix(example) for example in examples]
        injection = self._injection(examples, keys, prior, with_memory)
        answers = [_said(each) for each in self._facts_of(examples, prompts)]
        generations = generate(self.backbone, prompts, max_new_tokens, *injection, answers=answers)
        tokenizer = self.backbone.tokenizer
        return [tokenizer.decode(g.token_ids, skip_special_tokens=True).strip() for g in generations]

    def facts_of(self, examples: Sequence[Example]) -> list[FactFound | FactMissed | None]:
        """The fact that each of n questions asks for, or the nearest; none at all if there are no facts."""
        return self._facts_of(examples, [self.scorer.prefix(example) for example in examples])

    def _facts_of(self, examples: Sequence[Example], prompts: Sequence[Inputs]) -> list[FactFound | FactMissed | None]:
        if self.facts is None or self.bundle is None:
            return []
        tasks = fact_tasks(self.bundle, self.evidence(examples))
        asked = [
            replace(self.facts.reader.question(prompt["input_ids"][0].tolist()), picture=_shown(example))
            for example, prompt in zip(examples, prompts, strict=True)
        ]
        return [
            self.facts.find(facts, question, allowed)
            for facts, question, allowed in zip(self._asked(asked), asked, tasks, strict=True)
        ]

    def _asked(self, questions: Sequence[AskedQuestion]) -> list[AskedFacts]:
        found = [
            self._questions.candidates(each.text, has_media=each.has_media, picture=each.picture) for each in questions
        ]
        pairs = [pair for each in found for pair in each.to_judge]
        if self.judge is None:
            return [each.settled(None, 0.0) for each in found]
        odds, judged = self.judge.odds(pairs), self.judge.judged
        return [each.settled(odds, judged.threshold, judged.why_not) for each in found]


def _shown(example: Example) -> str | None:
    """The digest of the pictures of the latest turn that has some."""
    counts = [sum(part["type"] == "image" for part in message["content"]) for message in example.messages]
    last = next((count for count in reversed(counts) if count), 0)
    pictures = [decoded(path.read_bytes()) for path in example.images[len(example.images) - last :]]
    return joined([digest_of(each) for each in pictures]) if pictures else None


def _said(found: FactFound | FactMissed | None) -> Sequence[int] | None:
    """The stored answer, in tokens."""
    return found.token_ids if isinstance(found, FactFound) and found.withheld is None else None
