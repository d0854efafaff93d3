"""Drafts are made without memory and checked with it: the answers are those without drafts."""

import json
import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig, Qwen3Config
from vllm.inputs import TokensPrompt
from vllm.sampling_params import StructuredOutputsParams

from inducekv_vllm.protocol import InjectionSpec, parse_specs
from server.demo import CHECKPOINT
from tests.engine.parity import (
    FEWER_PROCESSES,
    TOLERANCE,
    MemoryEngine,
    Prompt,
    World,
    engine,
    greedy,
    make_world,
    prompts,
    served_logprobs,
    text_prompts,
)
from tests.reference import reference_logprobs
from tests.tiny_families import FAMILIES, LATENT_FAMILIES, ON_CPUS, TEXT_SIZES
from tests.tiny_models import HEAD_DIM, HIDDEN, save_tiny_text_model

WORDY = "Look at all of these coloured shapes on the white page again and say what they are."
ADDED = ("o_proj.weight", "down_proj.weight")  # what a layer adds to its input goes through them
HEAD_SIZES = ("num_attention_heads", "num_key_value_heads", "intermediate_size")


@contextmanager
def drafting(world: World, options: dict[str, Any] | None = None, **speculative: Any) -> Iterator[MemoryEngine]:
    usual = {"enforce_eager": True, "block_size": 32, "disable_log_stats": False, "max_num_batched_tokens": 96}
    usual["speculative_config"] = {"num_speculative_tokens": 3, **speculative}
    with engine(world.model, environment=FEWER_PROCESSES, **usual | (options or {})) as llm:
        yield MemoryEngine(world, llm)


def check(served: MemoryEngine, make_prompts: Callable[[int, int], list[Prompt]]) -> None:
    """Every form and activation, open and closed; the second time, requests are decided at once."""
    questions, tasks = make_prompts(6, 18), ["a", None, "b", "b", "a", None]
    for activations in ({"a": "generation", "b": "prompt"}, {"a": "text", "b": "generation"}):
        with served.gated(questions, tasks, form="decoupled", weighting="uniform", activations=activations):
            for _ in range(2):
                answers = served.check(questions, ["gated"] * 6, greedy(max_tokens=24))
                assert [answer.decision and answer.decision.task for answer in answers] == tasks
    merged = ("sqrt", "prior") if "sqrt" in served.memories else ("other", "first")
    served.check(questions, [merged[0], "first", None, merged[1], "second", None], greedy(max_tokens=24))
    print(f"furthest from transformers {served.furthest}, drafted and accepted {drafts(served)}")


def drafts(served: MemoryEngine) -> tuple[float, float]:
    """How many tokens were drafted, and accepted."""
    drafted, accepted = (served.counted(f"spec_decode_num_{name}_tokens") for name in ("draft", "accepted"))
    return drafted, accepted


def save_dflash_head(folder: Path) -> Path:
    """A random block of one layer for the tiny Llama, in the layout of published ones."""
    sizes, head = TEXT_SIZES | {"num_hidden_layers": 1}, {"mask_token_id": 0, "target_layer_ids": [0, 1, 2]}
    save_tiny_text_model(folder, lambda **numbers: Qwen3Config(**sizes, dflash_config=head, **numbers), seed=7)
    settings = folder / "config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"architectures": ["DFlashDraftModel"]}))
    weights = load_file(folder / "model.safetensors")
    weights = {name.removeprefix("model."): weight for name, weight in weights.items()}
    del weights["lm_head.weight"], weights["embed_tokens.weight"]  # the model's
    generator = torch.Generator().manual_seed(7)
    weights["fc.weight"] = torch.randn((HIDDEN, 3 * HIDDEN), generator=generator) / (3 * HIDDEN) ** 0.5
    weights["hidden_norm.weight"] = torch.ones(HIDDEN)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def save_eagle_head(folder: Path, method: str, vocabulary: int) -> Path:
    """A head for the tiny Llama in the layout of published ones: a layer of a Llama, and `fc` before it.

    EAGLE-3's is random. EAGLE's adds nothing to the state of the pass, so it draws the model's last token again.
    """
    heads, kv_heads, inner = (TEXT_SIZES[name] for name in HEAD_SIZES)
    wide = 2 * HIDDEN if method == "eagle3" else HIDDEN  # EAGLE-3 shows its layer the token beside the state
    layer = {
        "self_attn.q_proj": (heads * HEAD_DIM, wide),
        "self_attn.k_proj": (kv_heads * HEAD_DIM, wide),
        "self_attn.v_proj": (kv_heads * HEAD_DIM, wide),
        "self_attn.o_proj": (HIDDEN, heads * HEAD_DIM),
        "mlp.gate_proj": (inner, HIDDEN),
        "mlp.up_proj": (inner, HIDDEN),
        "mlp.down_proj": (HIDDEN, inner),
        "post_attention_layernorm": (HIDDEN,),
    }
    if method == "eagle3":
        layer |= {"input_layernorm": (HIDDEN,), "hidden_norm": (HIDDEN,)}
        shapes = {f"midlayer.{name}": shape for name, shape in layer.items()}
        shapes |= {"fc": (HIDDEN, 3 * HIDDEN), "norm": (HIDDEN,), "lm_head": (vocabulary, HIDDEN)}
        architecture = "LlamaForCausalLMEagle3"
    else:
        shapes = {f"layers.0.{name}": shape for name, shape in layer.items()} | {"fc": (HIDDEN, 2 * HIDDEN)}
        architecture = "LlamaForCausalLM"
    config = LlamaConfig(**TEXT_SIZES | {"num_hidden_layers": 1}, vocab_size=vocabulary, architectures=[architecture])
    config.save_pretrained(folder)
    generator = torch.Generator().manual_seed(7)
    tensors = {
        f"{name}.weight": torch.randn(shape, generator=generator) / shape[-1] ** 0.5
        if len(shape) > 1
        else torch.ones(shape)
        for name, shape in shapes.items()
    }
    if method == "eagle":
        tensors["fc.weight"] = torch.cat([torch.zeros(HIDDEN, HIDDEN), torch.eye(HIDDEN)], dim=1)
        tensors |= {name: torch.zeros_like(tensors[name]) for name in tensors if name.endswith(ADDED)}
    save_file(tensors, folder / "model.safetensors")
    return folder


def save_draft(folder: Path, method: str, vocabulary: int) -> Path:
    """What a method of vLLM's drafts with, for the tiny Llama."""
    if method == "draft_model":
        return save_tiny_text_model(folder, lambda **sizes: LlamaConfig(**TEXT_SIZES, **sizes), seed=5)
    return save_dflash_head(folder) if method == "dflash" else save_eagle_head(folder, method, vocabulary)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["draft_model", "eagle", "eagle3", "dflash"])
def test_a_model_or_head_that_drafts(method: str, tmp_path: Path) -> None:
    """Untouched, though its layers' numbers and the model's overlap, or it sees the states of the pass with memory."""
    world = make_world(FAMILIES["llama"](tmp_path / "model"), tmp_path, make_prompts=text_prompts, with_merged=True)
    draft = save_draft(tmp_path / "draft", method, LlamaConfig.from_pretrained(tmp_path / "model").vocab_size)
    with drafting(world, method=method, model=str(draft)) as served:
        check(served, text_prompts)
        drafted, accepted = drafts(served)
        assert 0 <= accepted < drafted


@dataclass
class Blocks:
    """What the hashes of an engine's blocks stand for: they are looked at in every step of every request."""

    scheduler: Any
    of_hash: dict[bytes, Any] = field(default_factory=dict)
    of_content: dict[Any, bytes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        schedule = self.scheduler.schedule

        def followed(*args: Any, **options: Any) -> Any:
            output = schedule(*args, **options)
            for request in self.scheduler.requests.values():
                self._look_at(request)
            return output

        self.scheduler.schedule = followed

    def _look_at(self, request: Any) -> None:
        memory, size = self._memory_of(request), self.scheduler.hash_block_size
        ahead = getattr(self.scheduler.vllm_config, "num_hash_lookahead_tokens", 0)  # since vLLM 0.33
        for number, block_hash in enumerate(request.block_hashes):
            end = (number + 1) * size
            within = memory if memory is not None and memory.first_active < end else None
            content = tuple(request.all_token_ids[: end + ahead]), within
            assert self.of_hash.setdefault(block_hash, content) == content, "one hash for two contents"
            assert self.of_content.setdefault(content, block_hash) == block_hash, "two hashes for one content"

    def _memory_of(self, request: Any) -> InjectionSpec | None:
        """What its parameters say, or what was decided."""
        for spec in parse_specs(request.sampling_params.extra_args):
            if isinstance(spec, InjectionSpec):
                return spec
        asked = self.scheduler.asked.get(request.request_id)
        injections = () if asked is None or asked.decided is None else asked.decided.injections
        return injections[0] if injections else None


def test_blocks_of_memory_are_never_those_of_other_requests(tmp_path: Path) -> None:
    """Random small conversations in a prefix cache that is too small for them: with memory, another, or none.

    Prompts begin alike, and turns repeat answers of which drafts were accepted and rejected. Of every block in every
    step, what is in it is compared by brute force with all others of its hash; and answers with transformers'.
    """
    world = make_world(FAMILIES["llama"](tmp_path / "model"), tmp_path, make_prompts=text_prompts)
    vocabulary = LlamaConfig.from_pretrained(tmp_path / "model").vocab_size
    head, rng = save_eagle_head(tmp_path / "head", "eagle", vocabulary), random.Random(0)
    questions = [replace(each, question=f"{WORDY} {each.question}") for each in text_prompts(4, 18)]
    options = {"num_gpu_blocks_override": 40, "max_num_seqs": 4}
    with drafting(world, options, method="eagle", model=str(head)) as served:
        blocks = Blocks(served.offline.llm.llm_engine.engine_core.engine_core.scheduler)
        with served.gated(questions, ["a", None, "b", "a"], activations={"a": "generation", "b": "prompt"}):
            names = (None, "gated", "first", "second", "other")
            begun = [world.backbone.encode(each.chat_messages, [])["input_ids"][0].tolist() for each in questions]
            cached: Counter[str | None] = Counter()
            for _ in range(12):
                asked = [(rng.choice(begun), rng.choice(names)) for _ in range(4)]
                answers = served.offline.generate(
                    [TokensPrompt(prompt_token_ids=ids) for ids, _ in asked],
                    greedy(max_tokens=rng.choice([16, 40])),
                    memory=[name and served.memories[name] for _, name in asked],
                )
                for (ids, name), answer in zip(asked, answers, strict=True):
                    completion = answer.output.outputs[0]
                    tokens, logprobs = served_logprobs(completion)
                    assert (logprobs - expected_logprobs(served, name, ids, tokens)).abs().max() <= TOLERANCE
                    cached[name] += answer.output.num_cached_tokens or 0
                    begun += [ids + tokens[: rng.choice([8, len(tokens)])]] if len(ids) < 160 else []
        drafted, accepted = drafts(served)
    assert 0 < accepted < drafted
    assert min(cached[name] for name in names) > 0
    assert len({within for _, within in blocks.of_hash.values()}) > len(names)


def expected_logprobs(served: MemoryEngine, name: str | None, prompt: list[int], tokens: list[int]) -> Tensor:
    """transformers' [tokens] for an answer to these tokens."""
    ids = torch.tensor([prompt])
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    bundle = None if name is None else served.bundles[name]
    return reference_logprobs(served.world.backbone, bundle, inputs, tokens)


def add_mtp(folder: Path) -> Path:
    """Give a tiny model a layer for multi-token prediction behind its own, named as published ones are.

    It draws the model's last token again: its block adds nothing, and the state of the pass goes to the head as it is.
    """
    settings = json.loads((folder / "config.json").read_text())
    settings["num_nextn_predict_layers"] = 1
    (folder / "config.json").write_text(json.dumps(settings))
    weights, L = load_file(folder / "model.safetensors"), settings["num_hidden_layers"]
    ours, last = f"model.layers.{L}.", f"model.layers.{L - 1}."
    for name in [name for name in weights if name.startswith(last)]:
        weights[ours + name.removeprefix(last)] = weights[name] * (not name.endswith(ADDED))
    weights[f"{ours}eh_proj.weight"] = torch.cat([torch.zeros(HIDDEN, HIDDEN), torch.eye(HIDDEN)], dim=1)
    weights |= {f"{ours}{name}.weight": torch.ones(HIDDEN) for name in ("enorm", "hnorm", "shared_head.norm")}
    weights[f"{ours}shared_head.head.weight"] = weights["lm_head.weight"].clone()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize(
    "family", ["glm4-moe", *(pytest.param(each, marks=pytest.mark.slow) for each in ("deepseek-v3", "glm4-moe-lite"))]
)
def test_multi_token_prediction(family: str, tmp_path: Path) -> None:
    """Its layer has the number behind the model's last one, and no memory; the selector leaves it out."""
    is_latent = family in LATENT_FAMILIES
    model = add_mtp((LATENT_FAMILIES | FAMILIES)[family](tmp_path / "model"))
    world = make_world(model, tmp_path, make_prompts=text_prompts, with_merged=not is_latent)
    with drafting(world, ON_CPUS | {"block_size": None} if is_latent else {}, method="mtp") as served:
        check(served, text_prompts)
        drafted, accepted = drafts(served)
        assert 0 < accepted < drafted


def test_ngrams(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NUMBA_DISABLE_JIT", "1")  # it compiles for half a minute
    world = make_world(CHECKPOINT, tmp_path, with_merged=True)
    with drafting(world, method="ngram", prompt_lookup_max=3, prompt_lookup_min=1) as served:
        check(served, prompts)
        drafted, accepted = drafts(served)
        assert 0 < accepted < drafted
        params = greedy(
            structured_outputs=StructuredOutputsParams(choice=["red circle", "blue square"]), ignore_eos=False
        )
        questions = prompts(4, seed=3)
        with served.gated(questions, ["a", None, "b", "a"]):
            answers = served.chat(questions, ["gated"] * 4, params)
        assert {answer.output.outputs[0].text for answer in answers} <= {"red circle", "blue square"}
