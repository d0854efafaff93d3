"""Multi-head latent attention (MLA): memory of latents in vLLM gives what it gives in transformers, to 1e-4.

Every decoupled form: ungated and retrieved, behind a gate from the prompt, the text or the generation on, in the pass
that decides, and from the middle of a prompt.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from inducekv_vllm.bundle.activation import ACTIVATIONS
from inducekv_vllm.errors import UnsupportedModel
from tests.bundles import as_decoupled
from tests.engine.parity import (
    FEWER_PROCESSES,
    TOLERANCE,
    MemoryEngine,
    Prompt,
    engine,
    make_world,
    prompts,
    served_logprobs,
    silent_below,
    text_prompts,
)
from tests.tiny_families import LATENT_FAMILIES, LATENT_PICTURES, ON_CPUS, small_timm

IN_EVERY_RUN = "deepseek-v3"


@pytest.fixture(
    scope="module",
    params=[pytest.param(each, marks=() if each == IN_EVERY_RUN else pytest.mark.slow) for each in LATENT_FAMILIES],
)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[MemoryEngine]:
    folder = tmp_path_factory.mktemp(request.param)
    with small_timm():
        model = LATENT_FAMILIES[request.param](folder / "model")
        yield from _served(model, folder, with_pictures if request.param in LATENT_PICTURES else text_prompts)


def with_pictures(count: int, seed: int) -> list[Prompt]:
    return prompts(count, seed, size=(48, 96))


def _served(model: Path, folder: Path, make_prompts: Callable[[int, int], list[Prompt]]) -> Iterator[MemoryEngine]:
    world = make_world(model, folder, make_prompts=make_prompts)
    for activation in ACTIVATIONS:
        world.add(f"ungated {activation}", as_decoupled(world.merged["prior"], activation), folder)
    world.add("retrieved", as_decoupled(world.merged["prior"], "generation", "prior"), folder)
    with engine(model, environment=FEWER_PROCESSES, **ON_CPUS) as llm:
        yield MemoryEngine(world, llm)


def asked(served: MemoryEngine, count: int, seed: int) -> list[Prompt]:
    """With a picture each, if the model takes any."""
    make_prompts = text_prompts if served.world.backbone.kind == "text" else with_pictures
    return make_prompts(count, seed)


def test_every_form_without_a_decision(served: MemoryEngine) -> None:
    names = (None, *(f"ungated {activation}" for activation in ACTIVATIONS), "retrieved", "first", "second", "other")
    questions = asked(served, 2, 1)
    answers = served.check(questions * len(names), [name for name in names for _ in questions])
    for number in range(len(questions)):
        without, *others = answers[number :: len(questions)]
        for answer in others:
            both = [served_logprobs(each.output.outputs[0])[1] for each in (answer, without)]
            assert (both[0] - both[1]).abs().max() > 100 * TOLERANCE, "the memory does nothing"


@pytest.mark.parametrize("joins", [False, True], ids=["goes back", "joins the pass"])
def test_gates(served: MemoryEngine, joins: bool) -> None:
    """Open and closed, in one batch."""
    questions, tasks = asked(served, 4, 1), ["a", None, "b", None]
    last = 1 if joins else served.world.backbone.num_layers - 1
    with served.gated(questions, tasks, last_layer=last, **silent_below(served.world, last if joins else 0, 0)):
        answers = served.check(questions, ["gated"] * len(questions))
    assert [answer.decision and answer.decision.task for answer in answers] == tasks
    with served.gated(questions, tasks):  # one task from the prompt's start on
        served.check(questions, ["gated"] * len(questions))


def test_memory_from_the_middle_of_a_prompt(served: MemoryEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """As behind a picture."""
    import inducekv_vllm.frontend.request as of_the_frontend
    import inducekv_vllm.workers.decisions as of_workers
    import tests.reference as of_the_reference

    for module in (of_the_frontend, of_workers, of_the_reference):
        monkeypatch.setattr(module, "first_active_position", lambda activation, ids, placeholders: len(ids) // 2)
    questions, tasks = asked(served, 4, 2), ["a", None, "b", "a"]
    served.check(questions, ["ungated text"] * 4)
    with served.gated(questions, tasks, last_layer=1, **silent_below(served.world, 0, 0)):
        served.check(questions, ["gated"] * 4)


def test_classifiers(served: MemoryEngine) -> None:
    questions = asked(served, 3, 3)
    with served.gated(questions, ["a", None, "b"], by_classifiers=True):
        served.check(questions, ["gated"] * 3)


def test_aborted_requests_leave_nothing_behind(served: MemoryEngine) -> None:
    questions, tasks = asked(served, 4, 6), ["a", None, "b", "a"]
    with served.gated(questions, tasks):
        served.abort_two(questions, "gated")
        served.check(questions, ["gated"] * 4)
        served.check(questions, [None] * 4)
    stats = served.stats()
    assert (stats["slots_used"], stats["requests_known"]) == (0, 0)


def test_rotation_that_vllm_computes_wrongly_is_refused(served: MemoryEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the flag, answers would be wrong without memory, too. YaRN's are not."""
    if served.world.backbone.fingerprint.rope["rope_type"] == "yarn":
        return
    # vLLM keeps what rotates, with the flags of the process's first engine.
    monkeypatch.setattr("vllm.model_executor.layers.rotary_embedding._ROPE_DICT", {})
    options = ON_CPUS | {"compilation_config": None}
    with (
        pytest.raises(UnsupportedModel, match=r"RoPE on CPUs rotates its queries wrongly.*-rotary_embedding"),
        engine(served.world.model, environment=FEWER_PROCESSES, **options),
    ):
        pass


@pytest.mark.slow
def test_two_ranks(tmp_path: Path) -> None:
    """Each has half of the heads, and all latents: one of them counts what a gate sees."""
    model = LATENT_FAMILIES[IN_EVERY_RUN](tmp_path / "model")
    world = make_world(model, tmp_path, make_prompts=text_prompts)
    world.add("retrieved", as_decoupled(world.merged["prior"], "generation", "prior"), tmp_path)
    environment = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}
    with engine(model, environment=environment, tensor_parallel_size=2, **ON_CPUS) as llm:
        served = MemoryEngine(world, llm)
        questions, tasks = text_prompts(4, 1), ["a", None, "b", None]
        served.check(questions, [None, "retrieved", "first", "second"])
        for by_classifiers in (False, True):
            with served.gated(questions, tasks, by_classifiers=by_classifiers):
                answers = served.check(questions, ["gated"] * 4)
            assert [answer.decision and answer.decision.task for answer in answers] == tasks
