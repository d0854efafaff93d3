"""Shared by the parity tests: models, their bundles, prompts with images, engines, and the comparison.

The reference is `selector.backbone.injection` in transformers, float32: it shares no attention code with the plugin.
"""

import base64
import gc
import io
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.nn.functional import normalize
from vllm import LLM, SamplingParams

from inducekv_vllm.backbone.turns import turn_marks
from inducekv_vllm.bundle import Bundle, EntryRecord, Gate, write_bundle
from inducekv_vllm.bundle.activation import Activation
from inducekv_vllm.bundle.lookup import BundleIndex, QueryFeatures
from inducekv_vllm.frontend.offline import MemoryAnswer, MemoryLLM
from inducekv_vllm.protocol import Decision
from inducekv_vllm.retrieval.entry_terms import Weighting
from inducekv_vllm.vllm_seams.config import SCHEDULER_CLS, WORKER_CLS
from selector.backbone.extraction import extract
from selector.backbone.model import Backbone
from selector.backbone.token_values import evidence_in, evidence_of_prompts, token_values
from tests.bundles import MAP_RANK, as_decoupled, by_default, classified_gate, remade
from tests.reference import reference_evidence, reference_key, reference_logprobs

TOLERANCE = 1e-4  # on every token's log-probability, float32
NEW_TOKENS = 16
DEFAULTS: tuple[tuple[str, str, Activation, float], ...] = (
    ("first", "prior", "prompt", 6.0),
    ("second", "prior", "generation", -6.0),
    ("other", "other", "text", 6.0),
)
# Most of an engine's start is its processes' import of vLLM. With these settings an `LLM` runs in the process of the
# tests, and a server's worker in the process of its engine.
FEWER_PROCESSES = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
# vLLM compiles what ranks log-probabilities even if the model runs eagerly: seconds of each process.
EAGER = {"TORCH_COMPILE_DISABLE": "1"}
WORKER_VARIABLE = "INDUCEKV_TEST_WORKER"  # a class in place of the platform's worker
QUESTIONS = (
    "What colour is the circle?",
    "How many squares are there?",
    "Is the red triangle left of the blue one? Answer with one word.",
    "yes no 1 2 3",
    "Answer in a sentence. The picture shows two green stars and a yellow ring. How many stars are there?",
)


@dataclass(frozen=True)
class Prompt:
    """One question about one random image, or about none."""

    image: Image.Image | None
    question: str

    @property
    def images(self) -> list[Image.Image]:
        return [] if self.image is None else [self.image]

    @property
    def chat_messages(self) -> list[dict[str, Any]]:
        """As `selector.data.examples.Example` has them."""
        parts = [*({"type": "image"} for _ in self.images), {"type": "text", "text": self.question}]
        return [{"role": "user", "content": parts}]

    @property
    def messages(self) -> list[dict[str, Any]]:
        """In OpenAI's format, for vLLM."""
        if self.image is None:
            return [{"role": "user", "content": self.question}]
        buffer = io.BytesIO()
        self.image.save(buffer, "PNG")
        url = "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
        parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": self.question}]
        return [{"role": "user", "content": parts}]


def prompts(count: int, seed: int, size: tuple[int, int] = (48, 48)) -> list[Prompt]:
    """Questions about pictures of `size`, rows and columns."""
    rng = np.random.default_rng(seed)
    return [
        Prompt(Image.fromarray(rng.integers(0, 256, (*size, 3), dtype=np.uint8)), QUESTIONS[i % len(QUESTIONS)])
        for i in range(count)
    ]


def text_prompts(count: int, seed: int) -> list[Prompt]:
    """Questions without pictures."""
    numbers = np.random.default_rng(seed).integers(0, 1000, (count, 3)).tolist()
    return [Prompt(None, f"{QUESTIONS[i % len(QUESTIONS)]} {each}") for i, each in enumerate(numbers)]


@dataclass(frozen=True)
class World:
    """A model, its reference, and bundles extracted with it."""

    model: Path
    backbone: Backbone
    bundles: dict[str, Bundle]
    paths: dict[str, Path]
    merged: dict[str, Bundle] = field(default_factory=dict)  # which the others are made of; without files

    @property
    def heads_per_kv_head(self) -> int:
        return self.backbone.num_heads // self.backbone.num_kv_heads

    @property
    def map_rank(self) -> int:
        """Of bundles in the default form; memories of latents have no maps."""
        return 0 if self.backbone.is_latent else MAP_RANK

    def add(self, name: str, bundle: Bundle, folder: Path) -> None:
        self.bundles[name], self.paths[name] = bundle, folder / f"{name}.safetensors"
        write_bundle(bundle, self.paths[name])


def make_world(
    model: Path,
    folder: Path,
    num_entries: int = 12,
    payload_tokens: int = 6,
    make_prompts: Callable[[int, int], list[Prompt]] = prompts,
    with_merged: bool = False,
) -> World:
    """The bundles "first" and "second" of the same entries and "other" of different ones, as `by_default` makes them.

    Each acts on another part of a request. They are made of merged ones, whose gates and biases differ by layer; those
    called "sqrt" and "prior" have files, too, if `with_merged`.
    """
    backbone, merged = _read(model, num_entries, payload_tokens, make_prompts)
    world = World(model, backbone, {}, {}, dict(merged))
    for name, source, activation, scale in DEFAULTS:
        world.add(name, by_default(merged[source], activation, world.heads_per_kv_head, scale, world.map_rank), folder)
    for name in ("sqrt", "prior") if with_merged else ():
        world.add(name, merged[name], folder)
    return world


@lru_cache(maxsize=1)  # files that follow each other use the demo model
def _read(
    model: Path, num_entries: int, payload_tokens: int, make_prompts: Callable[[int, int], list[Prompt]]
) -> tuple[Backbone, dict[str, Bundle]]:
    """The reference and the merged bundles of `make_world`."""
    backbone, merged = Backbone.load(model), dict[str, Bundle]()
    extractions = {}
    for first in (100, 200):
        prefixes = make_prompts(num_entries, first)
        examples: Any = [SimpleNamespace(messages=p.chat_messages, load_images=lambda p=p: p.images) for p in prefixes]
        extractions[first] = extract(backbone, examples, payload_tokens)
    weightings: dict[str, Weighting] = {"sqrt": "sqrt", "prior": "prior", "other": "sqrt"}
    for seed, (name, weighting) in enumerate(weightings.items()):
        extraction = extractions[100 if name != "other" else 200]
        merged[name] = Bundle.create(
            retrieval_keys=extraction.keys,
            payload_keys=extraction.payload_keys,
            payload_values=extraction.payload_values,
            temperature=0.07,
            value_gates=torch.linspace(0.3, 0.9, backbone.num_layers),
            layer_bias=torch.linspace(-0.5, 0.5, backbone.num_layers),
            backbone=backbone.fingerprint,
            budget=num_entries,
            entries=tuple(EntryRecord(id=str(i), task="t", source_digest=f"{seed}-{i}") for i in range(num_entries)),
            weighting=weighting,
            recipe="build",
            settings={},
        )
    return backbone, merged


def gated_bundle(
    world: World,
    questions: Sequence[Prompt],
    tasks: Sequence[str | None],
    last_layer: int | None = None,
    near: tuple[float, ...] | None = None,
    **changes: Any,
) -> Bundle:
    """The entries of "first" divided among two tasks, behind a gate fitted to N prompts.

    Decoupled, uniform and with maps, one task's on the prompt and the other's on the generation, unless `changes` name
    another form.

    The gate chooses the task tasks[i] for questions[i], and is closed if that is None. It looks at the first layer
    without a window and at `last_layer`, None for the last such. Its prototypes are tokens of these prompts; its
    weights are the least-norm ones with margin 0.5 for a question's task and -0.5 for the others.
    """
    backbone, ungated, names = world.backbone, world.merged["prior"], ("a", "b")
    if "form" not in changes:
        changes = _default_form(world) | changes
    layers = (backbone.full_layers[0], backbone.full_layers[-1] if last_layer is None else last_layer)
    marks = turn_marks(backbone.processor)
    encoded = [backbone.encode(p.chat_messages, p.images) for p in questions]
    values = token_values(backbone, encoded, layers, marks)  # N times [t, S, F]
    tokens = torch.cat(values)
    center, scale = tokens.mean(0), 1 / tokens.std(0).clamp(min=1e-3)  # [S, F]
    generator = torch.Generator().manual_seed(0)
    some = [torch.cat([torch.randperm(len(v), generator=generator)[:6], torch.tensor([-2, -1])]) for v in values]
    picked = torch.cat([v[rows] for v, rows in zip(values, some, strict=True)])  # [P, S, F]
    prototypes = normalize((picked - center) * scale, dim=2).transpose(0, 1).half()  # [S, P, F]
    S, P, _ = prototypes.shape
    gate = Gate(
        layers=layers,
        marks=marks,
        center=center,
        scale=scale,
        prototypes=prototypes,
        floors=torch.full((S, P), 0.25),
        weights=torch.zeros(2, S * P),
        thresholds=torch.ones(2),
        tasks=names,
        near=near,
    )
    evidence = evidence_in(gate, values).double()  # [N, H]
    margins = torch.tensor([[0.5 if task == name else -0.5 for name in names] for task in tasks]).double()  # [N, C]
    gate = replace(gate, weights=torch.linalg.lstsq(evidence, margins + 1, driver="gelsd").solution.T.float())
    entries = tuple(e.model_copy(update={"task": names[i % 2]}) for i, e in enumerate(ungated.metadata.entries))
    bundle = remade(ungated, entries=entries, recipe="refined", gate=gate, **changes)
    assert bundle.gate is not None
    torch.testing.assert_close(evidence @ bundle.gate.weights.T.double() - 1, margins, rtol=0, atol=1e-3)
    assert bundle.gate.weights.abs().sum(1).max() * TOLERANCE < 0.1  # the tolerance of evidence changes no decision
    return bundle


def behind_classifiers(
    bundle: Bundle, world: World, questions: Sequence[Prompt], tasks: Sequence[str | None]
) -> Bundle:
    """The bundle of `gated_bundle` behind a gate of random classifiers, which decides the same on these prompts."""
    assert bundle.gate is not None
    drawn = classified_gate(
        world.backbone.fingerprint,
        bundle.gate.tasks,
        classified=len(questions),
        layers=bundle.gate.layers,
        marks=bundle.gate.marks,
        center=bundle.gate.center,
        scale=bundle.gate.scale,
    ).stored()
    encoded = [world.backbone.encode(p.chat_messages, p.images) for p in questions]
    evidence = evidence_of_prompts(world.backbone, drawn, encoded).double()  # [N, H]
    margins = torch.tensor([[0.5 if task == name else -0.5 for name in drawn.tasks] for task in tasks]).double()
    thresholds = torch.ones(len(drawn.tasks))
    weights = torch.linalg.lstsq(evidence, margins + 1, driver="gelsd").solution.T.float()
    torch.testing.assert_close(evidence @ weights.T.double() - 1, margins, rtol=0, atol=1e-3)
    return remade(bundle, gate=replace(drawn, weights=weights, thresholds=thresholds))


def _default_form(world: World) -> dict[str, Any]:
    maps = {"map_rank": world.map_rank, "heads_per_kv_head": world.heads_per_kv_head}
    late = as_decoupled(world.merged["prior"], "prompt", **maps)
    tensors = {
        name: getattr(late, name) for name in ("payload_values", "value_gates", "layer_bias", "map_in", "map_out")
    }
    activations = {"a": "prompt", "b": "generation"}
    return {"form": "decoupled", "weighting": "uniform", "activations": activations, **tensors}


def silent_below(world: World, layer: int, map_rank: int) -> dict[str, Any]:
    """Changes for `gated_bundle`: both tasks act on the generation, "a" in no layer below this one."""
    late = as_decoupled(world.merged["prior"], "generation", map_rank=map_rank)
    changes: dict[str, Any] = {"form": "decoupled", "weighting": "uniform", "value_gates": late.value_gates}
    changes["activations"] = dict.fromkeys(("a", "b"), "generation")
    for name in ("payload_values", "map_in", "map_out"):
        if (tensor := getattr(late, name)) is not None:
            changes[name] = tensor.clone()
            if name != "map_in":
                changes[name][:layer, ::2] = 0  # the entries of "a"
    return changes


@contextmanager
def engine(
    model: Path, *, memory: bool = True, environment: dict[str, str] | None = None, **options: Any
) -> Iterator[LLM]:
    """A real vLLM engine, ended afterwards; `memory=False` starts vLLM without the plugin."""
    settings = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_PLUGINS": "inducekv" if memory else "", **(environment or {})}
    options = {"dtype": "float32", "max_model_len": 256, "max_num_seqs": 8, **options}
    if torch.cuda.is_available():  # else an engine would take all of the GPU
        options = {"kv_cache_memory_bytes": 1 << 30, "gpu_memory_utilization": 0.1, **options}
    if memory:
        ours = {
            "worker_cls": os.environ.get(WORKER_VARIABLE, WORKER_CLS),
            "scheduler_cls": SCHEDULER_CLS,
            "additional_config": {"inducekv": {}},
        }
        options = ours | options
    with few_collections(), pytest.MonkeyPatch.context() as patch:
        for name, value in settings.items():
            patch.setenv(name, value)
        llm = LLM(str(model), **options)
        try:
            yield llm
        finally:
            llm.llm_engine.engine_core.shutdown()


@contextmanager
def few_collections() -> Iterator[None]:
    """vLLM collects garbage ten times as an engine starts and ends: half a second each, with all that tests import."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gc, "collect", lambda *_: 0)
        yield
    gc.collect()


def greedy(**options: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": NEW_TOKENS, "ignore_eos": True, "logprobs": 0, **options})


def served_logprobs(completion: Any) -> tuple[list[int], Tensor]:
    """The tokens of one completion and their log-probabilities [tokens]."""
    tokens = list(completion.token_ids)
    return tokens, torch.tensor([step[t].logprob for step, t in zip(completion.logprobs, tokens, strict=True)])


def deviation(world: World, prompt: Prompt, completion: Any, bundle: Bundle | None, **options: Any) -> float:
    """`largest_deviation` of one completion."""
    return largest_deviation(world, prompt, *served_logprobs(completion), bundle, **options)


def largest_deviation(
    world: World,
    prompt: Prompt,
    tokens: Sequence[int],
    logprobs: Tensor | Sequence[float],
    bundle: Bundle | None,
    *,
    top_k: int | None = None,
) -> float:
    """Largest |log p(vLLM) - log p(transformers)| over tokens; without a bundle, transformers runs the plain model."""
    inputs = world.backbone.encode(prompt.chat_messages, prompt.images)
    weighting = "uniform" if bundle is None else bundle.metadata.weighting
    top_k = None if weighting == "uniform" else top_k  # which has nothing to choose by
    remainder = top_k is not None and weighting == "sqrt"
    expected = reference_logprobs(world.backbone, bundle, inputs, tokens, top_k=top_k, remainder=remainder)
    return float((torch.as_tensor(logprobs) - expected).abs().max())


class MemoryEngine:
    """An engine of a world's model with all its bundles loaded that it can serve."""

    def __init__(self, world: World, llm: LLM) -> None:
        self.world, self.offline = world, MemoryLLM(llm)
        self.bundles = dict(world.bundles)
        self.furthest = {"without memory": 0.0, "with memory": 0.0}  # from the reference, of all that was checked
        # On a GPU attention in float32 gives no log-sum-exp, which merged memory needs.
        decoupled_alone = torch.cuda.is_available() and llm.llm_engine.vllm_config.model_config.dtype == torch.float32
        self.memories = {
            name: self.offline.load_bundle(path)
            for name, path in world.paths.items()
            if world.bundles[name].metadata.form == "decoupled" or not decoupled_alone
        }

    def chat(
        self, questions: Sequence[Prompt], names: Sequence[str | None], params: SamplingParams, **options: Any
    ) -> list[MemoryAnswer]:
        """Ask each question with the memory of its name, or with none."""
        memories = [name and self.memories[name] for name in names]
        return self.offline.chat([prompt.messages for prompt in questions], params, memory=memories, **options)

    def check(
        self,
        questions: Sequence[Prompt],
        names: Sequence[str | None],
        params: SamplingParams | None = None,
        *,
        top_k: int | None = None,
    ) -> list[MemoryAnswer]:
        """The answers, after every one was compared with the reference."""
        answers = self.chat(questions, names, params or greedy(), top_k=top_k)
        for prompt, answer, name in zip(questions, answers, names, strict=True):
            bundle = name and self.bundles[name]
            for completion in answer.output.outputs:
                assert len(completion.token_ids) >= NEW_TOKENS
                difference = deviation(self.world, prompt, completion, bundle, top_k=top_k)
                kind = "without memory" if bundle is None else "with memory"
                self.furthest[kind] = max(self.furthest[kind], difference)
                assert difference <= TOLERANCE, (name, difference)
            if answer.decision is not None:
                self.check_decision(prompt, answer.decision, self.bundles[str(name)], top_k)
        return answers

    def check_decision(self, prompt: Prompt, decision: Decision, bundle: Bundle, top_k: int | None = None) -> None:
        """Against gate and index with what the untouched model in transformers tells."""
        backbone, gate = self.world.backbone, bundle.gate
        inputs = backbone.encode(prompt.chat_messages, prompt.images)
        evidence = None if gate is None else reference_evidence(backbone, bundle, inputs)  # [H]
        key = None if bundle.metadata.weighting == "uniform" else reference_key(backbone, inputs).numpy()  # [d]
        features = QueryFeatures(key, None if evidence is None else evidence.numpy())
        expected = BundleIndex.from_bundle(bundle).lookup(features, top_k)
        assert (decision.margins is None) == (gate is None)
        if decision.margins is not None and expected.gate_decision is not None:
            assert evidence is not None
            assert evidence.max() > 0
            assert (decision.task, decision.closed) == (expected.gate_decision.task, expected.gate_decision.closed)
            np.testing.assert_allclose(decision.margins, expected.gate_decision.margins, rtol=0, atol=10 * TOLERANCE)
        assert (decision.injection is None) == (expected.retrieval is None)
        if decision.injection is not None and expected.retrieval is not None:
            weights = dict(zip(decision.injection.entries, decision.injection.weights, strict=True))
            reference = dict(zip(expected.retrieval.entries.tolist(), expected.retrieval.weights.tolist(), strict=True))
            assert weights.keys() == reference.keys()
            np.testing.assert_allclose(list(weights.values()), [reference[i] for i in weights], rtol=0, atol=TOLERANCE)

    def abort_two(self, questions: Sequence[Prompt], name: str) -> None:
        """Ask, and end two of the requests: one that has not answered yet, and one that has some of its tokens."""
        llm_engine, ended = self.offline.llm.llm_engine, list[str]()
        step, scheduler = llm_engine.step, llm_engine.engine_core.engine_core.scheduler  # type: ignore[attr-defined]

        def step_and_abort() -> Any:
            outputs = step()
            for request in scheduler.running:
                if len(ended) == request.num_output_tokens // 3 < 2:  # 0: of the prompt, a part
                    llm_engine.abort_request([request.request_id], internal=True)
                    ended.append(request.request_id)
                    break
            return outputs

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(llm_engine, "step", step_and_abort)
            with pytest.raises(ValueError, match="zip"):  # two have no answer
                self.chat(questions, [name] * len(questions), greedy())
        assert len(ended) == 2

    def counted(self, name: str) -> int:
        """One of vLLM's counters, which counts where an engine has `disable_log_stats=False`."""
        return next(m for m in self.offline.llm.get_metrics() if m.name == f"vllm:{name}").value  # type: ignore[union-attr]

    def stats(self) -> dict[str, Any]:
        """Of the worker, after a step in which it hears of finished requests."""
        for _ in range(2):
            self.chat(text_prompts(1, 9), [None], greedy(max_tokens=2))
        stats: dict[str, Any] = self.offline.llm.collective_rpc("inducekv_stats")[0]
        return stats

    @contextmanager
    def gated(
        self, questions: Sequence[Prompt], tasks: Sequence[str | None], *, by_classifiers: bool = False, **changes: Any
    ) -> Iterator[None]:
        """With the bundle of `gated_bundle` loaded as "gated", or that of `behind_classifiers`."""
        path = next(iter(self.world.paths.values())).with_name("gated.safetensors")
        bundle = gated_bundle(self.world, questions, tasks, **changes)
        self.bundles["gated"] = behind_classifiers(bundle, self.world, questions, tasks) if by_classifiers else bundle
        write_bundle(self.bundles["gated"], path)
        self.memories["gated"] = self.offline.load_bundle(path)
        yield
        self.offline.unload_bundle(self.memories.pop("gated"))
