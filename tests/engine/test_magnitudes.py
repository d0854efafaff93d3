"""Whatever bundle was served before, the base answers bit for bit as on an engine that has served nothing."""

import math
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from inducekv_vllm.bundle import Bundle, MagnitudeLimits, check_magnitudes, magnitude_limits, write_bundle
from inducekv_vllm.errors import BundleError
from inducekv_vllm.workers import refusals
from server.demo import CHECKPOINT
from tests.bundles import as_decoupled, random_bundle, random_maps, remade
from tests.engine.parity import FEWER_PROCESSES, MemoryEngine, engine, greedy, make_world, prompts

# bfloat16 carries what float32 does; float16 takes minutes on a CPU.
DTYPES = ("float32", pytest.param("float16", marks=pytest.mark.slow))
FORMS = ("sqrt", "prior", "prompt-uniform", "prompt-prior", "generation-uniform")
SIGNS = ("plus", "minus", "mixed")
BEFORE: dict[str, list[Any]] = {}  # by dtype, what the base answered before anything else was served
NO_LIMITS = MagnitudeLimits(value_gates=3e38, layer_bias=3e38, payload_values=65504.0, map_gain=65504.0**2)


@pytest.fixture(scope="module", params=DTYPES)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[MemoryEngine]:
    """The demo model with so few blocks that a few requests write to all of them."""
    world = make_world(CHECKPOINT, tmp_path_factory.mktemp("magnitudes"), num_entries=4)
    small = {"max_model_len": 192, "num_gpu_blocks_override": 12, "block_size": 32}
    with engine(world.model, environment=FEWER_PROCESSES, enforce_eager=True, dtype=request.param, **small) as llm:
        served = MemoryEngine(world, llm)
        BEFORE[request.param] = base_answers(served)
        yield served


def dtype_of(served: MemoryEngine) -> torch.dtype:
    dtype = served.offline.llm.llm_engine.model_config.dtype
    assert isinstance(dtype, torch.dtype)
    return dtype


def base_answers(served: MemoryEngine) -> list[tuple[list[int], list[float] | None]]:
    """Tokens and log-probabilities, and without these; nothing comes from the prefix cache."""
    found = []
    for logprobs in (0, None):
        served.offline.llm.reset_prefix_cache()
        for answer in served.chat(prompts(2, seed=5), [None] * 2, greedy(logprobs=logprobs, max_tokens=8)):
            (completion,) = answer.output.outputs
            steps = completion.logprobs and [
                step[token].logprob for step, token in zip(completion.logprobs, completion.token_ids, strict=True)
            ]
            found.append((list(completion.token_ids), steps))
    return found


def signed(size: float, like: torch.Tensor, signs: str) -> torch.Tensor:
    """Numbers of one magnitude, shaped like a tensor."""
    if signs == "mixed":
        return size * torch.randn(like.shape, generator=torch.Generator().manual_seed(0)).sign()
    return torch.full(like.shape, size if signs == "plus" else -size)


def largest_bundle(made: Bundle, form: str, limits: MagnitudeLimits, signs: dict[str, str], maps: bool) -> Bundle:
    """Of a bundle's entries, in each tensor the largest numbers that load."""
    bias = signed(limits.layer_bias, made.layer_bias, signs["bias"]) * 0.999
    values = signed(min(limits.payload_values * 0.999, 65504), made.payload_values, signs["values"])
    keys = signed(65504, made.payload_keys, signs["keys"])
    changes: dict[str, Any] = {"payload_keys": keys, "payload_values": values, "layer_bias": bias}
    if form in ("sqrt", "prior"):
        return remade(made, weighting=form, value_gates=torch.ones(made.num_layers), **changes)
    activation, weighting = form.split("-")
    if maps:
        drawn = random_maps(made.payload_keys.shape, 2, 2)
        inner, outer = signed(1.0, drawn["map_in"], "mixed"), signed(1.0, drawn["map_out"], signs["maps"])
        width = inner.shape[-1]  # the gain is 2 times the width times the product of both sizes
        outer *= min(limits.map_gain * 0.99 / (2 * width), 65504)
        changes |= {"map_in": inner, "map_out": outer}
    gates = signed(limits.value_gates * 0.999, made.value_gates, signs["gates"])
    decoupled = as_decoupled(made, activation, weighting)  # type: ignore[arg-type]
    kept = {"form": "decoupled", "activations": decoupled.metadata.activations}
    return remade(decoupled, value_gates=gates, **kept, **changes)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("limited", [True, False])
def test_the_largest_numbers_leave_the_base_alone(
    served: MemoryEngine, limited: bool, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that load; and without limits nothing that is not finite is left either."""
    rng, limits = Random(form), magnitude_limits(dtype_of(served))
    signs = {name: rng.choice(SIGNS) for name in ("gates", "bias", "values", "keys", "maps")}
    if not limited:
        limits = NO_LIMITS
        monkeypatch.setattr(refusals, "check_magnitudes", lambda *_: None)
    check_base_after(
        served, largest_bundle(served.world.merged["prior"], form, limits, signs, maps=form != "prompt-prior")
    )


def check_base_after(served: MemoryEngine, bundle: Bundle) -> None:
    """The base's answers after a bundle was served from every block, against those of the new engine."""
    path = served.world.paths["first"].with_name("largest.safetensors")
    write_bundle(bundle, path)
    memory = served.offline.load_bundle(path)
    try:
        questions = [prompt.messages for prompt in prompts(6, seed=6)]
        served.offline.chat(questions, greedy(max_tokens=8, logprobs=None), memory=memory)
    finally:
        served.offline.unload_bundle(memory)
    assert base_answers(served) == BEFORE[str(dtype_of(served)).removeprefix("torch.")]


def test_what_the_served_dtype_cannot_carry_is_refused_when_it_is_loaded(served: MemoryEngine, tmp_path: Path) -> None:
    decoupled = as_decoupled(served.world.merged["prior"], "prompt")
    kept = {"form": "decoupled", "activations": decoupled.metadata.activations}
    gates = torch.full((decoupled.num_layers,), 3e38)
    write_bundle(remade(decoupled, value_gates=gates, **kept), tmp_path / "huge.safetensors")
    limit = f"{magnitude_limits(dtype_of(served)).value_gates:.4g}"
    with pytest.raises(BundleError) as refusal:
        served.offline.load_bundle(tmp_path / "huge.safetensors")
    served_in = f"a model that is served in {dtype_of(served)} takes at most {limit}"
    assert str(refusal.value).endswith(f"value_gates reaches 3e+38 in layer 0, and {served_in}")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"layer_bias": torch.tensor([0.0, -300.0, 0.0])}, "layer_bias reaches 300 in layer 1"),
        ({"payload_values": 300.0}, "payload_values reaches 300 in layer 0"),
        ({"map_in": 1.0, "map_out": 300 / 32}, "the gain of a map reaches 300 in layer 0"),
    ],
)
def test_each_tensor_has_its_limit(change: dict[str, Any], reason: str) -> None:
    """In float16; the other dtypes carry all of these."""
    plain = random_bundle()
    sizes = {"payload_values": plain.payload_values.shape, "map_in": (3, 5, 2, 2, 16), "map_out": (3, 5, 2, 16, 2)}
    change = {name: torch.full(sizes[name], x) if isinstance(x, float) else x for name, x in change.items()}
    bundle = random_bundle(form="decoupled", weighting="uniform", activations={"t": "prompt"}, **change)
    with pytest.raises(BundleError, match=f"^memory: {reason}, and a model that is served in torch.float16"):
        check_magnitudes(bundle, torch.float16, "memory")
    for dtype in (torch.bfloat16, torch.float32):
        check_magnitudes(bundle, dtype, "memory")
    assert math.isclose(magnitude_limits(torch.float16).payload_values, 65504**0.5)
