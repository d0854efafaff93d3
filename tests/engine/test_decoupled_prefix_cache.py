"""Prefix-cache blocks around late memory: the same tokens under every memory, with generated blocks and any block size.

Every answer is compared with transformers, so a block that was taken for another one is found.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import zmq
from vllm.config import KVEventsConfig
from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVEventBatch
from vllm.inputs import TokensPrompt

from inducekv_vllm.bundle import Bundle, write_bundle
from inducekv_vllm.bundle.activation import ACTIVATIONS
from inducekv_vllm.frontend.offline import MemoryAnswer, MemoryLLM
from inducekv_vllm.frontend.served_bundle import ServedBundle
from server.demo import CHECKPOINT
from tests.bundles import as_decoupled
from tests.engine.parity import FEWER_PROCESSES, TOLERANCE, World, engine, greedy, make_world, served_logprobs
from tests.reference import reference_logprobs

EVENTS = "inproc://kv-events"


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(CHECKPOINT, tmp_path_factory.mktemp("late"))


class Turns:
    """An engine whose every answer is checked."""

    def __init__(self, world: World, offline: MemoryLLM, folder: Path) -> None:
        self.world, self.offline, self.folder = world, offline, folder

    def load(self, bundle: Bundle, name: str) -> ServedBundle:
        write_bundle(bundle, self.folder / name)
        return self.offline.load_bundle(self.folder / name)

    def ask(
        self, prompts: list[list[int]], memories: list[tuple[Bundle, ServedBundle] | None], **params: Any
    ) -> list[MemoryAnswer]:
        answers = self.offline.generate(
            [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts],
            greedy(**params),
            memory=[memory and memory[1] for memory in memories],
        )
        for prompt, memory, answer in zip(prompts, memories, answers, strict=True):
            tokens, served = served_logprobs(answer.output.outputs[0])
            inputs = {
                "input_ids": torch.tensor([prompt]),
                "attention_mask": torch.ones(1, len(prompt), dtype=torch.int64),
            }
            expected = reference_logprobs(self.world.backbone, memory and memory[0], inputs, tokens)
            assert (served - expected).abs().max() <= TOLERANCE
        return answers


@pytest.fixture(scope="module", params=[32, *(pytest.param(size, marks=pytest.mark.slow) for size in (64, 128))])
def turns(request: pytest.FixtureRequest, world: World, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Turns]:
    options = {"enforce_eager": True, "block_size": request.param, "max_model_len": 640, "num_gpu_blocks_override": 60}
    options |= {"kv_events_config": KVEventsConfig(enable_kv_cache_events=True, endpoint=EVENTS)}
    with engine(world.model, environment=FEWER_PROCESSES, **options) as llm:
        yield Turns(world, MemoryLLM(llm), tmp_path_factory.mktemp("bundles"))


def text(seed: int, length: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(20, 300, (length,), generator=generator).tolist()


def test_one_prompt_under_every_memory_in_any_order(turns: Turns) -> None:
    prompt = text(1, 300)
    bundles = [
        as_decoupled(turns.world.merged[name], activation, scale=scale)
        for activation in ACTIVATIONS
        for name, scale in (("prior", 4.0), ("other", -4.0))
    ]
    kinds: list[Any] = [None, *((bundle, turns.load(bundle, f"{i}.safetensors")) for i, bundle in enumerate(bundles))]
    order = torch.randperm(21, generator=torch.Generator().manual_seed(0)).tolist()
    for i in order:
        turns.ask([prompt], [kinds[i % 7]])
    turns.ask([prompt] * 21, [kinds[i % 7] for i in order])


def test_a_bundle_that_is_replaced_leaves_no_blocks_behind(turns: Turns) -> None:
    prompt = text(2, 300)
    for scale in (4.0, -4.0, 4.0):
        bundle = as_decoupled(turns.world.merged["prior"], "generation", scale=scale)
        memory = turns.load(bundle, "replaced.safetensors")
        turns.ask([prompt], [(bundle, memory)], max_tokens=140)
        turns.offline.unload_bundle(memory)


def test_generated_blocks_in_later_turns(turns: Turns) -> None:
    """A later turn repeats an answer whose K and V memory has changed: for each request they are other K and V."""
    bundles = [as_decoupled(turns.world.merged["prior"], "generation", scale=scale) for scale in (4.0, -4.0)]
    a, b = ((bundle, turns.load(bundle, f"turn-{i}.safetensors")) for i, bundle in enumerate(bundles))
    prompt = text(3, 150)
    for number, memory in enumerate((a, b, None, a)):
        (answer,) = turns.ask([prompt], [memory], max_tokens=150)
        later = [*prompt, *answer.output.outputs[0].token_ids, *text(10 + number, 30)]
        for other in (None, a, b, memory):
            turns.ask([later], [other])


def test_the_untouched_turn_is_shared(turns: Turns, request: pytest.FixtureRequest) -> None:
    """The second turn of a conversation computes what the first has not, also under another memory."""
    block = turns.offline.llm.llm_engine.vllm_config.cache_config.block_size
    bundle = as_decoupled(turns.world.merged["prior"], "generation", scale=4.0)
    memory = (bundle, turns.load(bundle, "shared.safetensors"))
    first = text(4, 290)
    second = [*first, *text(5, 60)]
    turns.ask([first], [None])
    (answer,) = turns.ask([second], [memory])
    assert answer.output.num_cached_tokens == len(first) // block * block
    for again in (None, memory):  # its untouched part is everybody's
        (answer,) = turns.ask([second], [again])
        assert answer.output.num_cached_tokens == (len(second) - 1) // block * block


class Router:
    """What a router knows of the cache: it hears vLLM's events, and tells blocks by their tokens and extra keys."""

    def __init__(self) -> None:
        self.names: dict[tuple[Any, ...], Any] = {}  # hashes
        self.cached: set[Any] = set()
        self._socket = zmq.Context.instance().socket(zmq.SUB)
        self._socket.connect(EVENTS)
        self._socket.subscribe("")

    def hear(self) -> None:
        while self._socket.poll(500):
            _, _, packed = self._socket.recv_multipart()
            for event in msgspec.msgpack.decode(packed, type=KVEventBatch).events:
                if isinstance(event, BlockStored):
                    self._store(event)
                else:
                    assert isinstance(event, BlockRemoved)
                    self.cached -= set(event.block_hashes)

    def _store(self, event: BlockStored) -> None:
        parent, size = event.parent_block_hash, event.block_size
        for number, found in enumerate(event.block_hashes):
            extra = event.extra_keys[number] if event.extra_keys else None
            name = (parent, *event.token_ids[number * size : (number + 1) * size], repr(extra))
            assert self.names.setdefault(name, found) == found  # two memories' blocks are never taken for one
            self.cached.add(found)
            parent = found

    def cached_tokens(self, prompt: list[int], size: int) -> int:
        """How many tokens of a prompt without memory are cached."""
        parent = None
        for first in range(0, len(prompt) - size + 1, size):
            parent = self.names.get((parent, *prompt[first : first + size], repr(None)))
            if parent not in self.cached:
                return first
        return len(prompt) // size * size


def test_events_tell_a_router_which_blocks_are_untouched(turns: Turns) -> None:
    block = turns.offline.llm.llm_engine.vllm_config.cache_config.block_size
    router, prompt = Router(), text(6, 290)
    before_last = (len(prompt) - 1) // block * block
    kinds = {
        activation: (bundle, turns.load(bundle, f"heard-{activation}.safetensors"))
        for activation in ("prompt", "generation")
        for bundle in [as_decoupled(turns.world.merged["prior"], activation, scale=4.0)]
    }
    for activation, untouched in (("prompt", 0), ("generation", before_last)):
        turns.ask([prompt], [kinds[activation]], max_tokens=100)
        router.hear()
        assert router.cached_tokens(prompt, block) == untouched
    (answer,) = turns.ask([prompt], [None], max_tokens=100)
    assert answer.output.num_cached_tokens == before_last
    for seeds in (range(first, first + 4) for first in range(7, 47, 4)):  # until they need its blocks
        turns.ask([text(seed, 600) for seed in seeds], [None] * 4)
        router.hear()
        if router.cached_tokens(prompt, block) < before_last:
            break
    (answer,) = turns.ask([prompt], [None])
    assert answer.output.num_cached_tokens == router.cached_tokens(prompt, block) < before_last
