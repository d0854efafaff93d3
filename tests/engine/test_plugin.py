"""Registration, configuration, what travels between the processes, and what is refused at start."""

import json
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import asdict, replace
from types import SimpleNamespace
from typing import Any

import pytest
from vllm import triton_utils
from vllm.config import VllmConfig
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

from inducekv_vllm.attention.attach import KeepsLse
from inducekv_vllm.attention.merged.cpu_backend import InduceKVCPUBackend, InduceKVCPUImpl
from inducekv_vllm.attention.merged.flash import InduceKVFlashBackend, InduceKVFlashImpl
from inducekv_vllm.errors import ConfigError, UnsupportedModel
from inducekv_vllm.facts import FactFound, FactMissed
from inducekv_vllm.plugin import register
from inducekv_vllm.protocol import (
    Decided,
    DecideSpec,
    Decision,
    Failed,
    InjectionSpec,
    Specs,
    TaskAdapter,
    Untouched,
    extra_args_of,
    parse_specs,
)
from inducekv_vllm.vllm_seams.config import SCHEDULER_CLS, InduceKVConfig
from inducekv_vllm.vllm_seams.requirements import (
    check_engine,
    check_gpu_runner,
    check_merged,
)


def test_registration_can_be_repeated_and_replaces_the_platforms_backends() -> None:
    register()
    register()
    assert AttentionBackendEnum.CPU_ATTN.get_class() is InduceKVCPUBackend
    assert AttentionBackendEnum.FLASH_ATTN.get_class() is InduceKVFlashBackend
    assert AttentionBackendEnum[InduceKVFlashBackend.get_name()] is AttentionBackendEnum.FLASH_ATTN


def test_a_library_that_knows_a_model_of_ours_keeps_its_own() -> None:
    """In a process of its own: another class has the names first. Registration imports no model."""
    code = """
import sys
from transformers import AutoConfig, PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from vllm.model_executor.models import ModelRegistry
from inducekv_vllm import models, plugin

plugin.register()
assert not [name for name in sys.modules if "modeling_qwen2_5" in name]
assert [*models.ARCHITECTURES] == [name for name in models.ARCHITECTURES if name in CONFIG_MAPPING]
models.ARCHITECTURES = {"another": "Another"}
Theirs = type("Theirs", (PretrainedConfig,), {"model_type": "another"})
AutoConfig.register("another", Theirs)
ModelRegistry.register_model("Another", "theirs:Model")
plugin.register()
assert CONFIG_MAPPING["another"] is Theirs
assert ModelRegistry.models["Another"].module_name == "theirs"
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"topk": 4}, "topk: Extra inputs are not permitted .found 4"),
        ({"memory_pool_entries": 0}, "memory_pool_entries: .* greater than or equal to 1 .found 0"),
        ({"memory_pool_entries": 2**28}, "memory_pool_entries: .* less than or equal to 134217728 .found 268435456"),
        ({"top_k": "4"}, "top_k: .* valid integer .found '4'"),
        ("bundles", "inducekv: .*"),
    ],
)
def test_wrong_settings_are_named(settings: Any, message: str) -> None:
    assert InduceKVConfig.parse({"bundles": {"a": "a.safetensors"}, "top_k": 4}).top_k == 4
    with pytest.raises(ConfigError, match=message):
        InduceKVConfig.parse(settings)


def test_specs_survive_the_journey() -> None:
    memory = InjectionSpec("digest", (3, 1), (0.75, 0.25), first_active=7)
    found = FactFound(3, 0.98, (7, 8))
    adapters = (("style", TaskAdapter("lora", 3, "/adapters/style")),)
    decide = DecideSpec("digest", False, None)
    asked = DecideSpec("digest", True, 4, adapters)
    every: tuple[Specs, ...] = ((memory,), (replace(memory, bundle="other"), memory), (decide,), (asked, decide))
    for specs in every:
        assert parse_specs(json.loads(json.dumps({**extra_args_of(specs), "other": 1}))) == specs
    decisions = (
        Decision(memory, "none", "a", (0.5, -0.25), 0.75, 0.001),
        Decision(Untouched("outside"), margins=(-1.0,)),
        Decision(TaskAdapter("lora", 3, "/adapters/style"), task="a", fact=found),
        Decision(Untouched(), fact=replace(found, withheld="the request asks for structured output")),
        Decision(Untouched(), missed=FactMissed(3, "it names 'lyon'", ("berlin",), ("lyon",))),
        Decision(Failed("not finite")),
    )
    for decided in (Decided(decisions[:1]), Decided(decisions[1:3]), Decided(decisions[3:])):
        assert Decided.unpack(decided.pack()) == decided
    assert parse_specs(None) == parse_specs({}) == parse_specs({"other": 1}) == ()
    for broken in ([{"bundle": "x"}], [asdict(decide), asdict(memory)], {"bundle": "x"}):
        with pytest.raises(ValueError, match="no list of specs of one kind"):
            parse_specs({"inducekv": broken})


def test_specs_of_different_content_never_share_a_slot_or_a_cache_block() -> None:
    spec = InjectionSpec("digest", (3, 1), (0.75, 0.25))
    others = [
        replace(spec, bundle="other"),
        replace(spec, entries=(3, 2)),
        replace(spec, weights=(0.75, 0.25 + 2**-40)),
        replace(spec, expired=1),
        replace(spec, entries=(31,)),
    ]
    assert len({spec.content, *(other.content for other in others)}) == 6
    assert spec.content == replace(spec).content


def _media(**changes: Any) -> dict[str, Any]:
    """Settings of a model that takes pictures."""
    media = {"mm_processor_cache_type": "lru", "media_io_kwargs": {}}
    return {"multimodal_config": SimpleNamespace(**(media | changes))}


def _engine(**changes: Any) -> Any:
    """The settings of an engine, its model and its parallelism, in one namespace."""
    sizes = {"pipeline_parallel_size": 1, "data_parallel_size": 1, "decode_context_parallel_size": 1}
    sizes |= {"prefill_context_parallel_size": 1, "tensor_parallel_size": 1}
    sizes |= {"use_ubatching": False, "enable_expert_parallel": False}
    model = {"use_mla": False, "is_encoder_decoder": False, "runner_type": "generate", "is_hybrid": False}
    model |= {"multimodal_config": None}
    model |= {"model_arch_config": SimpleNamespace(quantization_config=None)}
    model |= {"is_diffusion": False, "quantization": None, "enable_sleep_mode": False, "cache_dtype": "auto"}
    model |= {"hf_text_config": SimpleNamespace()}
    top = {"speculative_config": None, "kv_transfer_config": None, "ec_transfer_config": None}
    top |= {"mamba_cache_mode": "none"}
    top |= {"kv_sharing_fast_prefill": False, "scheduler_cls": SCHEDULER_CLS}
    engine = SimpleNamespace(**(sizes | model | top | changes))
    engine.parallel_config = engine.model_config = engine.cache_config = engine.scheduler_config = engine
    return engine


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"speculative_config": SimpleNamespace(method="medusa")}, "speculative decoding by 'medusa'"),
        ({"scheduler_cls": None}, f"the scheduler None: .* --scheduler-cls {SCHEDULER_CLS}"),
        ({"pipeline_parallel_size": 2}, "pipeline parallelism"),
        ({"data_parallel_size": 2}, "data parallelism of a mixture of experts"),
        (_media(mm_processor_cache_type="shm"), "--mm-processor-cache-type shm"),
        (
            _media(media_io_kwargs={"image": {"image_mode": None}}),
            """--media-io-kwargs '{"image": {"image_mode": null}}'""",
        ),
        (
            _media(media_io_kwargs={"image": {"rgba_background_color": [0, 0, 0]}}),
            "task data's pictures .* lie on white",
        ),
        ({"ec_transfer_config": object()}, "encoder disaggregation"),
        ({"enable_sleep_mode": True}, "sleep mode"),
        ({"decode_context_parallel_size": 2}, "context parallelism"),
        ({"kv_transfer_config": object()}, "KV transfer"),
        ({"prefill_context_parallel_size": 2}, "context parallelism: no rank sees all rows"),
        ({"use_ubatching": True}, "ubatches"),
        ({"is_diffusion": True}, "diffusion language models"),
        ({"hf_text_config": SimpleNamespace(kv_lora_rank=512)}, r"latent attention .*\(VLLM_MLA_DISABLE=1"),
        ({"use_mla": True, "hf_text_config": SimpleNamespace(index_topk=2048)}, r"sparse latent attention \(DSA\)"),
        ({"use_mla": True, "cache_dtype": "fp8_ds_mla"}, r"quantised cache of latents \(fp8_ds_mla\)"),
        ({"is_encoder_decoder": True}, "encoder-decoder"),
        ({"quantization": "fp8"}, "weights that vLLM quantises as it loads them"),
        ({"runner_type": "pooling"}, "'pooling' runner"),
        ({"kv_sharing_fast_prefill": True}, "--kv-sharing-fast-prefill"),
        ({"mamba_cache_mode": "all"}, "--mamba-cache-mode all: .* tried with none, align"),
    ],
)
def test_engines_that_would_be_wrong_are_refused(change: dict[str, Any], reason: str) -> None:
    check_engine(_engine())
    same = {"image_mode": "RGB", "rgba_background_color": [255, 255, 255]}
    check_engine(_engine(**_media(media_io_kwargs={"image": same, "video": {"num_frames": 4}})))
    with pytest.raises(UnsupportedModel, match=reason):
        check_engine(_engine(**change))


def test_kernels_that_are_the_same_in_every_batch_are_not_promised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    with pytest.raises(UnsupportedModel, match="VLLM_BATCH_INVARIANT"):
        check_engine(_engine())


@pytest.mark.parametrize(
    ("has_triton", "asked", "is_v2", "reason"),
    [
        (True, None, True, None),
        (True, "0", False, None),
        (True, None, False, "VLLM_USE_V2_MODEL_RUNNER=0 asks for the V1 runner, which vLLM means to remove"),
        (False, "0", False, "needs Triton and its driver"),
    ],
)
def test_on_a_gpu_nothing_changes_the_model_runner_silently(
    has_triton: bool, asked: str | None, is_v2: bool, reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_utils, "HAS_TRITON", has_triton)
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)
    if asked is not None:
        monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", asked)
    with nullcontext() if reason is None else pytest.raises(UnsupportedModel, match=reason):
        check_gpu_runner(_engine(use_v2_model_runner=is_v2))


def _impl(kind: type, **changes: Any) -> Any:
    impl = kind.__new__(kind)
    absent = dict.fromkeys(("alibi_slopes", "sinks", "kv_sharing_target_layer_name"))
    settings = {"sliding_window": -1, "logits_soft_cap": 0, "kv_cache_dtype": "auto", "fa4_hd256": False}
    vars(impl).update({**settings, **absent, **changes})
    return impl


def _cache(kind: type) -> Any:
    return SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=kind.__new__(kind))])


CAUSAL: Any = SimpleNamespace(use_mla=False, is_mm_prefix_lm=False, rswa_window=None)


@pytest.mark.parametrize(("kind", "ours"), [(InduceKVCPUImpl, InduceKVCPUImpl), (InduceKVFlashImpl, KeepsLse)])
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"sliding_window": 128}, "layer x has sliding-window attention .128 tokens"),
        ({"sliding_window": (127, 0)}, r"layer x has sliding-window attention \(\(127, 0\) tokens"),
        ({"alibi_slopes": object()}, "layer x has ALiBi"),
        ({"sinks": object()}, "layer x has attention sinks"),
        ({"logits_soft_cap": 30.0}, "layer x has a soft cap"),
        ({"kv_cache_dtype": "fp8_e4m3"}, "layer x has a quantised KV cache"),
        ({"kv_sharing_target_layer_name": "y"}, "layer x has a KV cache shared between layers"),
    ],
)
def test_attention_that_memory_cannot_be_merged_into_is_refused(
    kind: type, ours: type, change: dict[str, Any], reason: str
) -> None:
    full = _cache(FullAttentionSpec)
    check_merged(full, [("x", _impl(kind)), ("y", _impl(kind, sliding_window=(-1, -1)))], ours, CAUSAL)
    with pytest.raises(UnsupportedModel, match=reason):
        check_merged(full, [("y", _impl(kind)), ("x", _impl(kind, **change))], ours, CAUSAL)


@pytest.mark.parametrize(
    ("spec", "impl", "model", "reason"),
    [
        (SlidingWindowSpec, {}, {}, "found KV caches of .'SlidingWindowSpec'"),
        (FullAttentionSpec, None, {}, "layer x uses InduceKVCPUImpl.* --attention-backend FLASH"),
        (FullAttentionSpec, {"fa4_hd256": True}, {}, "layer x has FlashAttention 4's kernel for head size 256"),
        (FullAttentionSpec, {}, {"is_mm_prefix_lm": True}, "the model's attention is not causal everywhere"),
        (FullAttentionSpec, {}, {"use_mla": True}, r"one softmax .* latent attention \(MLA\) has latents"),
        (FullAttentionSpec, {}, {"rswa_window": 64}, "the model's attention is not causal everywhere"),
    ],
)
def test_other_caches_backends_and_models_are_refused(
    spec: type, impl: dict[str, Any] | None, model: dict[str, Any], reason: str
) -> None:
    own = _impl(InduceKVCPUImpl) if impl is None else _impl(InduceKVFlashImpl, **impl)
    with pytest.raises(UnsupportedModel, match=reason):
        check_merged(_cache(spec), [("x", own)], KeepsLse, SimpleNamespace(**(vars(CAUSAL) | model)))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("own", "settings", "expected"), [(3, {"inducekv": {}}, 2), (3, {}, 3), (0, {"inducekv": {}}, 0)]
)
def test_only_decode_steps_of_engines_with_memory_are_whole_graphs(
    own: int, settings: dict[str, Any], expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    builder = InduceKVFlashBackend.get_builder_cls()
    monkeypatch.setattr(builder, "_cudagraph_support", AttentionCGSupport(own))
    config: Any = SimpleNamespace(additional_config=settings)
    assert builder.get_cudagraph_support(config, object()) == AttentionCGSupport(expected)  # type: ignore[arg-type]


def test_settings_of_memory_are_no_part_of_what_is_compiled() -> None:
    """vLLM looks for a compiled model by the hash of its configuration."""
    several = [{"inducekv": {"memory_pool_entries": 64}}, {"inducekv": {"state": "other.sqlite"}}, {"inducekv": {}}]
    configs = [VllmConfig(additional_config=each) for each in several]
    named = [InduceKVConfig.named_alone(config) for config in configs]
    assert len({config.compute_hash() for config in configs}) == 3
    assert len({config.compute_hash() for config in named}) == 1
    assert [config.additional_config for config in configs] == several
    others = InduceKVConfig.named_alone(VllmConfig(additional_config={"inducekv": {}, "other": 1}))
    assert others.compute_hash() != named[0].compute_hash()
    assert InduceKVConfig.from_vllm(others) is not None
