"""A request that is asked again is answered as it was before, whatever was decided, and so is each of its samples.

On the V1 runner; `test_scheduler.py` has V2 and asynchronous scheduling, with a runner that stands in.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.lora.request import LoRARequest

from inducekv_vllm.bundle import FactRecord, write_bundle
from inducekv_vllm.frontend.memory_engine import pop_decided
from inducekv_vllm.frontend.request import AdaptedMemory, require_rendered, specs_for, with_asked, with_specs
from inducekv_vllm.frontend.served_bundle import ServedBundle
from inducekv_vllm.protocol import Decided, TaskAdapter
from inducekv_vllm.teaching import fact_of
from tests.engine.parity import (
    FEWER_PROCESSES,
    TOLERANCE,
    MemoryEngine,
    Prompt,
    World,
    engine,
    gated_bundle,
    greedy,
    make_world,
    prompts,
    served_logprobs,
    silent_below,
)
from tests.server.launch import save_adapter
from tests.tiny_models import save_tiny_llava

QUESTIONS, TASKS = prompts(4, seed=31), ("a", "b", None, None)  # what gates decide about them
PICTURE = "Which part is this?"
OPTIONS: dict[str, Any] = {
    "enforce_eager": True,
    "block_size": 32,
    "max_num_batched_tokens": 96,
    "max_model_len": 128,
    "num_gpu_blocks_override": 7,  # one request runs alone, and of several one is preempted
    "disable_log_stats": False,
    "additional_config": {"inducekv": {"max_memories": 2}},
}
LORA = {"enable_lora": True, "max_lora_rank": 8}
DRAFTS = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}}


@dataclass(frozen=True)
class Asked:
    """A question to some memories of the engine."""

    memories: tuple[str, ...]
    prompt: Prompt
    outcome: Callable[[Decided], object]  # holds for what is decided
    adapters: dict[str, LoRARequest] = field(default_factory=dict)  # by task


class Engine:
    def __init__(self, served: MemoryEngine, folder: Path, *, has_drafts: bool) -> None:
        self.served, self.folder, self.has_drafts = served, folder, has_drafts

    def load(self, name: str, **changes: Any) -> None:
        path = self.folder / f"{name}.safetensors"
        write_bundle(gated_bundle(self.served.world, QUESTIONS, TASKS, **changes), path)
        self.served.memories[name] = self.served.offline.load_bundle(path)

    def teach(self, name: str, facts: Sequence[FactRecord], before: ServedBundle | None = None) -> None:
        path = self.folder / f"{name}.safetensors"
        self.served.memories[name], _ = self.served.offline.teach(facts, path, before)

    def ask(self, asked: Asked, n: int = 1) -> Iterator[tuple[list[int], torch.Tensor]]:
        """Tokens and log-probabilities of each of `n` answers: with drafts to as many requests, otherwise to one.

        vLLM has no greedy sampling of several, and beside drafts no other way to the likeliest token.
        """
        offline = self.served.offline
        prompt = require_rendered(offline.llm._preprocess_chat_one(asked.prompt.messages))
        memories = [AdaptedMemory(self.served.memories[name], asked.adapters) for name in asked.memories]
        (facts,) = offline._asked([prompt], [tuple(each.memory for each in memories)])
        specs = with_asked(specs_for(memories, prompt, offline.config, offline._placeholders), facts)
        likeliest = {"n": n, "temperature": 1.0, "top_p": 1e-6} if n > 1 and not self.has_drafts else {}
        count = 1 if likeliest else n
        params = with_specs(greedy(max_tokens=40, **likeliest), specs)
        outputs = offline._run([prompt] * count, [params] * count)
        for output in outputs:
            decided = Decided.without_worker(specs) or pop_decided(output)
            assert decided is not None
            assert decided.error is None
            assert asked.outcome(decided), decided
        answers = [answer for output in outputs for answer in output.outputs]
        assert len(answers) == n
        return map(served_logprobs, answers)


def injected(decided: Decided) -> bool:
    return bool(decided.injections)


def untouched(decided: Decided) -> bool:
    return not decided.injections and decided.adapter is None and decided.answer is None


def answered(decided: Decided) -> bool:
    return decided.answer is not None


def adapted(decided: Decided) -> bool:
    return isinstance(decided.adapter, TaskAdapter)


KNOWN = Prompt(None, "Please tell me what the code of Oslo is!")
CASES = {
    "no gate": Asked(("first",), QUESTIONS[0], injected),
    "entries on the prompt": Asked(("gated",), QUESTIONS[0], injected),
    "entries on the generation": Asked(("gated",), QUESTIONS[1], injected),
    "a closed gate": Asked(("gated",), QUESTIONS[2], untouched),
    "decided in the pass": Asked(("late",), QUESTIONS[0], injected),
    "retrieved entries": Asked(("weighted",), QUESTIONS[0], injected),
    "merged memory": Asked(("sqrt",), QUESTIONS[0], injected),
    "two memories": Asked(("gated", "other"), QUESTIONS[1], injected),
    "two memories, the own one closed": Asked(("gated", "first"), QUESTIONS[2], injected),
    "an adapter": Asked(("gated",), QUESTIONS[0], adapted, {"a": LoRARequest("style", 7, "adapter")}),
    "another task's adapter": Asked(("gated",), QUESTIONS[1], injected, {"a": LoRARequest("style", 7, "adapter")}),
    "a fact": Asked(("facts",), KNOWN, answered),
    "no fact": Asked(("facts",), QUESTIONS[0], untouched),
    "a fact beside entries": Asked(("gated facts",), QUESTIONS[0], lambda each: injected(each) and answered(each)),
    "a fact of the second memory": Asked(("gated", "facts"), KNOWN, answered),
    "a fact of a picture": Asked(("pictures",), Prompt(QUESTIONS[3].image, PICTURE), answered),
}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    folder = tmp_path_factory.mktemp("repeated")
    model = save_tiny_llava(folder / "model")
    save_adapter(model, folder / "adapter", folder / "merged")
    return make_world(model, folder, with_merged=True)


@pytest.fixture(scope="module", params=["adapters and facts", "drafts"])
def asking(request: pytest.FixtureRequest, world: World, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    options = {**OPTIONS, **(DRAFTS if request.param == "drafts" else LORA)}
    with engine(world.model, environment=FEWER_PROCESSES, **options) as llm:
        asking = Engine(
            MemoryEngine(world, llm), tmp_path_factory.mktemp("bundles"), has_drafts=request.param == "drafts"
        )
        asking.load("gated")
        asking.load("late", last_layer=2, **silent_below(world, 2, map_rank=3))
        asking.load("weighted", form="decoupled", weighting="prior", activations={"a": "prompt", "b": "text"})
        if request.param != "drafts":
            llm.llm_engine.add_lora(adapter_in(world))
            codes = [fact_of(f"What is the code of {city}?", city[::-1], "codes") for city in ("Oslo", "Lima", "Rome")]
            asking.teach("facts", codes)
            shown = [asking.served.offline.picture(Prompt(each.image, PICTURE).messages) for each in QUESTIONS]
            beside = [fact_of(QUESTIONS[0].question, "red", "a", None, None, shown[0])]
            asking.teach("gated facts", beside, asking.served.memories["gated"])
            parts = [fact_of(PICTURE, f"number {at}", "parts", None, None, each) for at, each in enumerate(shown)]
            asking.teach("pictures", parts)
        yield asking


def adapter_in(world: World) -> LoRARequest:
    return LoRARequest("style", 7, str(world.model.with_name("adapter")))


@pytest.mark.parametrize("name", CASES)
def test_the_answer_is_the_first_one(name: str, asking: Engine) -> None:
    """Three times, and three at once."""
    asked = CASES[name]
    if missing := set(asked.memories) - asking.served.memories.keys():
        pytest.skip(f"not served with drafts: {missing}")
    (first,) = asking.ask(asked)
    for n in (1, 1, 3):
        for tokens, logprobs in asking.ask(asked, n):
            assert tokens == first[0]
            torch.testing.assert_close(logprobs, first[1], rtol=0, atol=TOLERANCE)


def test_some_were_preempted(asking: Engine) -> None:
    metrics = asking.served.offline.llm.get_metrics()
    assert next(each for each in metrics if each.name == "vllm:num_preemptions").value > 0  # type: ignore[union-attr]
