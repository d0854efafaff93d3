"""Which facts a request asks for: by its words, and by what a judge says, before the engine has it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, cast

from vllm.engine.protocol import EngineClient
from vllm.inputs import EngineInput

from ..backbone.fact_reader import AskedQuestion, FactReader
from ..backbone.judged import Judged
from ..backbone.meaning import SentenceEncoder
from ..backbone.pair_classifier import PairClassifier
from ..backbone.stored_facts import NO_ANSWER, Candidates
from ..bundle import BackboneFingerprint, FactRecord
from ..errors import InduceKVError
from ..facts import NO_FACTS, AskedFacts
from ..judge import JudgePrompt, Pair
from ..vllm_seams.config import InduceKVConfig
from ..vllm_seams.logs import logger_of
from .judging import AskedJudge, ClassifierJudge, EngineJudge
from .meant import MeantQuestions
from .pictures import shown_in
from .served_bundle import ServedBundle

logger = logger_of(__name__)
MEASURED_AT_ONCE: Final = 4  # pairs: other requests do not wait for more
LONGEST_S: Final = 30.0  # that a request waits for the judge
Asked = tuple[AskedFacts, ...]  # of each of a request's memories
Judging = asyncio.Task[Asked]


class FactFinder:
    """See the module docstring. It belongs to an event loop."""

    def __init__(self, client: EngineClient, config: InduceKVConfig) -> None:
        """Raises UnsupportedModel: the classifier that is to judge cannot, or the encoder is none."""
        self._client, self._threshold = client, config.judge_threshold
        self._classifier = None if config.judge is None else PairClassifier(config.judge)
        self._meant = None if config.encoder is None else MeantQuestions(SentenceEncoder(config.encoder))
        self._generate = client.generate  # vLLM's own, before the server replaces it
        self._started: asyncio.Task[tuple[FactReader, FactJudge]] | None = None

    @property
    def judged(self) -> Judged | None:
        """None before the first request to a memory with facts."""
        if (started := self._started) is None or not started.done() or started.exception() is not None:
            return None
        return started.result()[1].judged

    async def asked(
        self, memories: Sequence[ServedBundle], prompt: EngineInput, before_waiting: Callable[[], None]
    ) -> tuple[Asked, Judging | None]:
        """What a prompt asks for, of each of its memories, as far as it is known; and what a judge will say of it.

        Args:
            before_waiting: is called before others may run, which vLLM may have told that this prompt brings a picture.
        """
        if not any(memory.metadata.facts for memory in memories):
            return tuple(NO_FACTS for _ in memories), None
        if self.judged is None:
            before_waiting()
        reader, judge = await self.started(memories[0])
        question = reader.question(cast(Mapping[str, Any], prompt)["prompt_token_ids"], shown_in(prompt))
        found = [await self._candidates(memory, question, judge, before_waiting) for memory in memories]
        known = tuple(judge.settled(each) for each in found)
        return known, judge.begun(found)

    async def resembled(self, memory: ServedBundle, facts: Sequence[FactRecord]) -> dict[str, list[str]]:
        """By the ids of new facts, those of facts with other answers that the judge takes for the same question.

        Nothing of facts about pictures, and nothing while it is not known whether the model can judge.
        """
        if not memory.metadata.facts:
            return {}
        _, judge = await self.started(memory)
        judge.begin_measuring()
        if not judge.judged.may_judge:
            return {}
        questions = await memory.stored_questions()
        found = {fact.id: questions.resembled(fact) for fact in facts if fact.picture is None}
        odds = await judge.odds([pair for each in found.values() for pair in each.to_judge])
        old = memory.metadata.facts
        named = {
            id: [old[fact.number].id for fact in each.settled(odds, judge.judged.threshold).facts]
            for id, each in found.items()
        }
        return {id: ids for id, ids in named.items() if ids}

    async def prepare(self, memory: ServedBundle) -> None:
        """Read the questions of a version's facts, if it has some, so that no request waits for them."""
        if memory.metadata.facts:
            await self.started(memory)
            await memory.stored_questions()

    async def started(self, memory: ServedBundle) -> tuple[FactReader, FactJudge]:
        """How the prompts of a memory's model are read, and its judge."""
        if self._started is None:
            self._started = asyncio.create_task(asyncio.to_thread(self._start, memory.metadata.backbone))
        return await asyncio.shield(self._started)

    def _start(self, backbone: BackboneFingerprint) -> tuple[FactReader, FactJudge]:
        reader = FactReader.of_engine(self._client.vllm_config, backbone)
        if self._classifier is not None:
            return reader, FactJudge(ClassifierJudge(self._classifier), Judged(self._threshold))
        prompt = JudgePrompt(reader.tokenizer)
        judged = Judged(self._threshold, has_room=prompt.fits(reader.context))
        return reader, FactJudge(EngineJudge(self._generate, prompt), judged)

    async def _candidates(
        self, memory: ServedBundle, question: AskedQuestion, judge: FactJudge, before_waiting: Callable[[], None]
    ) -> Candidates:
        if not memory.metadata.facts:
            return Candidates(())
        if not memory.has_questions:
            before_waiting()
        questions = await memory.stored_questions()
        found = questions.candidates(question.text, has_media=question.has_media, picture=question.picture)
        if self._meant is None or found.by_words or question.has_media:
            return found
        judge.begin_measuring()
        if not judge.judged.may_judge:
            return found
        return questions.joined(found, question.text, await self._meant.places(questions, question.text))


class FactJudge:
    """Asks a judge. It belongs to an event loop."""

    def __init__(self, judge: AskedJudge, judged: Judged) -> None:
        self._judge, self.judged = judge, judged
        self._measuring: asyncio.Task[None] | None = None

    def settled(self, found: Candidates) -> AskedFacts:
        """With what it has said so far."""
        if not found.to_judge:
            return found.settled(None, 0.0)
        self.begin_measuring()
        if not self.judged.may_judge:
            return found.settled(None, 0.0, self.judged.why_not)
        return found.settled(self.judged.known(found.to_judge), self.judged.threshold, NO_ANSWER)

    def begun(self, found: Sequence[Candidates]) -> Judging | None:
        """Asks about what it does not know yet; None: it knows all, or it cannot judge."""
        pairs = [pair for each in found for pair in each.to_judge]
        if not self.judged.may_judge or not self.judged.new(pairs):
            return None
        return asyncio.create_task(self._all_settled(pairs, found))

    async def _all_settled(self, pairs: Sequence[Pair], found: Sequence[Candidates]) -> Asked:
        await self.odds(pairs)
        return tuple(map(self.settled, found))

    async def odds(self, pairs: Sequence[Pair]) -> dict[Pair, float]:
        """Those that are known in time."""
        new = self.judged.new(pairs)
        if new:
            try:
                async with asyncio.timeout(LONGEST_S):
                    odds = dict(zip(new, await self._judge.said(new), strict=True))
                    again = self.judged.open(odds)
                    turned = await self._judge.said([pair.turned for pair in again])
                    self.judged.take(odds, dict(zip(again, turned, strict=True)))
            except TimeoutError:
                logger.warning("the judge has not answered within %g s: a request goes on without a fact", LONGEST_S)
            except (InduceKVError, RuntimeError) as error:
                logger.warning("the judge cannot answer: a request goes on without a fact: %s", error)
        return self.judged.known(pairs)

    def begin_measuring(self) -> None:
        """In the background, once."""
        if self._measuring is None and self.judged.is_to_be_measured:
            self.judged.is_asked = True
            self._measuring = asyncio.create_task(self._measure())
            self._measuring.add_done_callback(_log_failure)

    async def _measure(self) -> None:
        odds = list[float]()
        for part in self.judged.parts():
            pairs = self.judged.both_ways(part)
            for at in range(0, len(pairs), MEASURED_AT_ONCE):
                odds += await self._judge.said(pairs[at : at + MEASURED_AT_ONCE], goes_first=False)
            if self.judged.is_hopeless(odds):
                break
        found = self.judged.measured(odds)
        logger.info(
            "the judge %s other wordings of facts: AUROC %.3f, of the package's pairs it finds %.0f%% at a threshold "
            "of %.2f, and takes %.1f%% of those that ask something else",
            "judges" if self.judged.may_judge else "cannot judge",
            found.auroc,
            100 * found.found,
            found.threshold,
            100 * found.passed,
        )


def _log_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("it could not be measured whether the judge tells other wordings of facts: %s", error)
