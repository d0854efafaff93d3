"""Memory for `vllm.LLM`.

    llm = LLM(
        MODEL,
        worker_cls="inducekv_vllm.worker.InduceKVWorker",
        scheduler_cls="inducekv_vllm.scheduler.memory_scheduler",
        additional_config={"inducekv": {}},
    )
    offline = MemoryLLM(llm)
    memory = offline.load_bundle("shapes.safetensors")
    answers = offline.chat(conversations, SamplingParams(max_tokens=16), memory=memory)

Shapes: N prompts, k entries retrieved.
"""

import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, TypeVar, cast
from weakref import WeakKeyDictionary

from vllm import LLM
from vllm.exceptions import GenerationError
from vllm.inputs import EngineInput
from vllm.inputs.engine import tokens_input
from vllm.outputs import RequestOutput
from vllm.renderers.params import ChatParams
from vllm.sampling_params import SamplingParams

from ..backbone.fact_reader import AskedQuestion, FactReader
from ..backbone.fingerprint import backbone_fingerprint
from ..backbone.judged import Judged
from ..backbone.meaning import MeaningIndex, SentenceEncoder
from ..backbone.pair_classifier import PairClassifier
from ..backbone.placeholders import placeholder_ids
from ..backbone.stored_facts import Candidates, StoredQuestions
from ..bundle import Bundle, FactRecord, PictureRecord, read_bundle, read_public_key, require_signature, write_bundle
from ..errors import ConfigError, UnknownBundle, UnsupportedModel
from ..facts import AskedFacts
from ..judge import JudgePrompt, Pair, can_be_asked
from ..protocol import Decided, Decision
from ..teaching import Report, Taught, WhenFull, forgotten, taught
from ..vllm_seams.config import InduceKVConfig
from .judging import judge_params, odds_in
from .loading import load
from .memory_engine import pop_decided
from .pictures import note_pictures, read_as_task_data, record_of, shown_in
from .request import (
    AdaptedMemory,
    MemoryOptions,
    read_options,
    require_rendered,
    specs_for,
    with_asked,
    with_specs,
)
from .served_bundle import ServedBundle

_T = TypeVar("_T")


Memories = ServedBundle | tuple[ServedBundle, ...] | None  # of a prompt: one, its own and a shared one, or none


@dataclass(frozen=True)
class MemoryAnswer:
    """One prompt's answer, and why it is that: a decision about each of its memories."""

    output: RequestOutput
    decisions: tuple[Decision, ...]

    @property
    def decision(self) -> Decision | None:
        """About its own memory; None for a prompt without memory."""
        return self.decisions[0] if self.decisions else None


class MemoryLLM:
    """An `LLM` with memories. Bundles stay loaded until `unload_bundle` or the end of the engine."""

    def __init__(self, llm: LLM) -> None:
        """Read the public keys.

        Raises:
            UnsupportedModel: the engine was started without the memory worker, or the `judge` or the `encoder`
                cannot be one.
            ConfigError: a file cannot be used.
        """
        read_as_task_data()
        note_pictures(llm.llm_engine.renderer)
        self.llm = llm
        vllm_config = llm.llm_engine.vllm_config
        self.config = InduceKVConfig.from_vllm(vllm_config) or InduceKVConfig()
        try:
            llm.collective_rpc("inducekv_stats")
        except Exception as error:
            raise UnsupportedModel(
                'the engine\'s workers do not support memory: LLM(worker_cls="inducekv_vllm.worker.InduceKVWorker")'
            ) from error
        model, cache = vllm_config.model_config, vllm_config.load_config.download_dir
        self._backbone = backbone_fingerprint(model.model, model.revision, cache)
        self._placeholders = placeholder_ids(vllm_config.model_config.hf_config)
        self._signers = [read_public_key(path) for path in self.config.require_signature]
        self._classifier = None if self.config.judge is None else PairClassifier(self.config.judge)
        self._encoder = None if self.config.encoder is None else SentenceEncoder(self.config.encoder)
        self._meanings: WeakKeyDictionary[StoredQuestions, MeaningIndex] = WeakKeyDictionary()
        self._loaded: dict[str, ServedBundle] = {}  # by digest

    def load_bundle(self, path: str | os.PathLike[str]) -> ServedBundle:
        """Check a bundle and make it resident on every rank.

        Raises:
            BundleError: the file is not a valid bundle, was made for another backbone, or a worker cannot load it.
            UnsupportedModel: this engine cannot serve it; tasks with LoRA adapters only the server can.
            CapacityError: there is no room for it.
        """
        absolute = os.path.abspath(path)
        bundle = read_bundle(absolute, backbone=self._backbone, name=str(path))
        if self._signers:
            require_signature(bundle.signature, bundle.digest, self._signers, str(path))
        if bundle.metadata.task_adapters:
            raise UnsupportedModel(f"{path} sends tasks to LoRA adapters: serve it with inducekv-serve")
        load(self.llm.collective_rpc, absolute, bundle.digest)
        memory = self._loaded[bundle.digest] = ServedBundle.from_bundle(bundle, absolute)
        return memory

    def teach(
        self,
        facts: Sequence[FactRecord],
        path: str | os.PathLike[str],
        memory: ServedBundle | None = None,
        when_full: WhenFull = "forget",
    ) -> tuple[ServedBundle, Report]:
        """Write the next version of a memory with more facts, or a first one of them alone, and load it.

        Args:
            facts: see `inducekv_vllm.teaching.fact_of`, and `picture` for those about pictures.
            path: of the file to write, replaced if it exists.
            memory: stays loaded; None for no version before.
            when_full: see `inducekv_vllm.teaching.taught`; it is not known here which facts were used.

        Raises:
            InduceKVError: the facts cannot be stored (see `inducekv_vllm.teaching.taught`), the file of `memory` is
                gone or has another version now, or as for `load_bundle`.
        """
        before = None if memory is None else self._read(memory)
        return self._written(taught(before, facts, self._facts, when_full=when_full), path)

    def forget(
        self, ids: Collection[str], path: str | os.PathLike[str], memory: ServedBundle
    ) -> tuple[ServedBundle, Report]:
        """Write the next version of a memory without some of its facts, and load it.

        Args:
            ids: of the facts.
            path: of the file to write, replaced if it exists.
            memory: stays loaded.

        Raises:
            InduceKVError: `ids` is a string, it has no such fact, nothing would be left, or as for `teach`.
        """
        if isinstance(ids, str):
            raise ConfigError(f"expected a list of ids, found the string {ids!r}: its letters would be the ids")
        return self._written(forgotten(self._read(memory), ids), path)

    def _read(self, memory: ServedBundle) -> Bundle:
        """Where it was loaded from last."""
        path = self._loaded.get(memory.digest, memory).path
        return read_bundle(path, backbone=self._backbone, digest=memory.digest)

    def _written(self, made: Taught, path: str | os.PathLike[str]) -> tuple[ServedBundle, Report]:
        write_bundle(made.bundle, path)
        return self.load_bundle(path), made.report

    def picture(self, conversation: Any) -> PictureRecord:
        """Of the pictures of a conversation, for a fact about them: `fact_of(..., picture=...)`.

        Raises:
            TaskDataError: there are none.
        """
        _, prompt = self.llm.llm_engine.renderer.render_messages(conversation, ChatParams())
        return record_of(prompt)

    @cached_property
    def _facts(self) -> FactReader:
        return FactReader.of_engine(self.llm.llm_engine.vllm_config, self._backbone)

    def unload_bundle(self, memory: ServedBundle) -> None:
        """Drop `memory` here and in the workers. Raises UnknownBundle if it is not loaded."""
        if self._loaded.pop(memory.digest, None) is None:
            raise UnknownBundle(f"no memory bundle {memory.path} is loaded")
        self.llm.collective_rpc("inducekv_unload_bundle", args=(memory.digest,))

    def chat(
        self,
        conversations: Sequence[Any],
        params: SamplingParams | Sequence[SamplingParams],
        *,
        memory: ServedBundle | Sequence[Memories] | None = None,
        top_k: int | None = None,
        **chat_options: Any,
    ) -> list[MemoryAnswer]:
        """`LLM.chat` over N conversations, each with a memory or none.

        Args:
            conversations: N lists of OpenAI messages.
            params: one for all, or N.
            memory: one for all, or N; prompts with different memories and with none run in one batch. A prompt may have
                a tuple of two, its own and one that it shares with others, if the engine's `max_memories` is 2.
            top_k: entries retrieved; None for the engine's setting. A prompt's parameters may say it, too, by
                `extra_args`, for its own memory.
            chat_options: rendering options of `LLM.chat`, such as `chat_template_kwargs`.

        Raises:
            GenerationError: nothing could be decided about a prompt.
            InduceKVError, VLLMValidationError: an argument cannot be used, or a memory is not loaded.
        """
        renders = [partial(self.llm._preprocess_chat_one, each, **chat_options) for each in conversations]
        return self._answer(renders, params, memory, top_k)

    def generate(
        self,
        prompts: Sequence[Any],
        params: SamplingParams | Sequence[SamplingParams],
        *,
        memory: ServedBundle | Sequence[Memories] | None = None,
        top_k: int | None = None,
    ) -> list[MemoryAnswer]:
        """`LLM.generate` over N prompts; the arguments are those of `chat`."""
        renders = [partial(self.llm._preprocess_cmpl_one, each) for each in prompts]
        return self._answer(renders, params, memory, top_k)

    def _answer(
        self,
        renders: Sequence[Callable[[], EngineInput]],
        params: SamplingParams | Sequence[SamplingParams],
        memory: ServedBundle | Sequence[Memories] | None,
        top_k: int | None,
    ) -> list[MemoryAnswer]:
        all_params = _one_each(params, len(renders), "params")
        of_prompts: list[Memories] = _one_each(memory, len(renders), "memory")
        memories = [_as_tuple(each) for each in of_prompts]
        if top_k is not None and (isinstance(top_k, bool) or not isinstance(top_k, int) or top_k < 1):
            raise ConfigError(f"top_k must be a whole number from 1 on, found {top_k!r}")
        config = self.config if top_k is None else self.config.model_copy(update={"top_k": top_k})
        own = list[MemoryOptions]()
        for each, user_params in zip(memories, all_params, strict=True):
            self._check(each)
            own.append(read_options(user_params, each) if each else MemoryOptions())
        prompts = [require_rendered(render()) for render in renders]
        asked = self._asked(prompts, memories)
        specs = [
            specs_for([AdaptedMemory(memory) for memory in each], prompt, config, self._placeholders, options=options)
            for prompt, each, options in zip(prompts, memories, own, strict=True)
        ]
        specs = [with_asked(each, facts) for each, facts in zip(specs, asked, strict=True)]
        all_params = [with_specs(user_params, each) for user_params, each in zip(all_params, specs, strict=True)]
        outputs = self._run(prompts, all_params)
        answers = []
        for number, (output, of_it) in enumerate(zip(outputs, specs, strict=True)):
            decided = Decided.without_worker(of_it) or pop_decided(output)
            if decided is not None and decided.error is not None:
                raise GenerationError(f"prompt {number}: {decided.error}")
            answers.append(MemoryAnswer(output, () if decided is None else decided.each))
        return answers

    def _asked(
        self, prompts: Sequence[EngineInput], memories: Sequence[tuple[ServedBundle, ...]]
    ) -> list[tuple[AskedFacts, ...]]:
        """The facts that each prompt's text asks for, of each of its memories."""
        found = list[list[Candidates]]()
        for prompt, each in zip(prompts, memories, strict=True):
            facts = [memory for memory in each if memory.metadata.facts]
            token_ids = cast(Mapping[str, Any], prompt)["prompt_token_ids"]
            question = self._facts.question(token_ids, shown_in(prompt)) if facts else None
            found.append([self._candidates(memory, question) for memory in each])
        pairs = [pair for of_prompt in found for each in of_prompt for pair in each.to_judge]
        judged, odds = self._judged, self._judged.odds(pairs, self._said) if pairs else {}
        return [tuple(each.settled(odds, judged.threshold, judged.why_not) for each in of_it) for of_it in found]

    def _candidates(self, memory: ServedBundle, question: AskedQuestion | None) -> Candidates:
        if question is None or not memory.metadata.facts:
            return Candidates(())
        questions, text = memory.questions, question.text
        found = questions.candidates(text, has_media=question.has_media, picture=question.picture)
        if self._encoder is None or found.by_words or question.has_media:
            return found
        may_judge = self._judged.may_judge or self._judged.is_to_be_measured
        if not (may_judge and questions.texts and can_be_asked(text)):
            return found
        return questions.joined(found, text, self._meant(self._encoder, questions, text))

    def _meant(self, encoder: SentenceEncoder, questions: StoredQuestions, text: str) -> list[int]:
        """The places of questions that may mean what a text says."""
        if questions not in self._meanings:
            self._meanings[questions] = MeaningIndex(encoder, questions.texts)
        return self._meanings[questions].nearest(text)

    def _said(self, pairs: Sequence[Pair]) -> list[float]:
        if self._classifier is not None:
            return self._classifier.said(pairs)
        prompt = self._judge_prompt
        prompts = [tokens_input(prompt.token_ids(pair)) for pair in pairs]
        return [odds_in(each, prompt) for each in self._run(prompts, [judge_params(prompt)] * len(prompts))]

    @cached_property
    def _judge_prompt(self) -> JudgePrompt:
        return JudgePrompt(self._facts.tokenizer)

    @cached_property
    def _judged(self) -> Judged:
        has_room = self._classifier is not None or self._judge_prompt.fits(self._facts.context)
        return Judged(self.config.judge_threshold, has_room=has_room)

    def _run(self, prompts: Iterable[EngineInput], params: Sequence[SamplingParams]) -> list[RequestOutput]:
        outputs: list[RequestOutput] = self.llm._render_and_run_requests(
            prompts=prompts,
            params=params,
            output_type=RequestOutput,
            lora_requests=[None] * len(params),
            use_tqdm=False,
        )
        return outputs

    def _check(self, memories: tuple[ServedBundle, ...]) -> None:
        if len(memories) > self.config.most_memories:
            raise ConfigError(f"a prompt may have {self.config.most_memories} (max_memories), found {len(memories)}")
        if len({memory.digest for memory in memories}) < len(memories):
            raise ConfigError("expected two different memories for a prompt, found one twice")
        for memory in memories:
            if memory.digest not in self._loaded:
                raise UnknownBundle(f"no memory bundle {memory.path} is loaded")


def _as_tuple(memory: Memories) -> tuple[ServedBundle, ...]:
    if memory is None:
        return ()
    return memory if isinstance(memory, tuple) else (memory,)


def _one_each(value: _T | Sequence[_T], count: int, name: str) -> list[_T]:
    """Repeat `value` for `count` prompts. Raises ConfigError if it is a sequence with another length."""
    if not isinstance(value, Sequence):
        return [value] * count
    if len(value) != count:
        raise ConfigError(f"expected one value or {count} for {name}, found {len(value)}")
    return list(value)
