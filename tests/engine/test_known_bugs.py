"""vLLM's own faults on CPUs are refused, and are still there: a test here fails once vLLM has mended what it shows.

Then its refusal in `vllm_seams/known_bugs.py` goes. Tests marked `slow` need an engine, which is without InduceKV.
`test_cpu_lora.py` has the fault of adapters.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from vllm.config import set_current_vllm_config
from vllm.config.vllm import VllmConfig
from vllm.model_executor.kernels.linear.mixed_precision.cpu import CPUWNA16LinearKernel
from vllm.model_executor.kernels.linear.mixed_precision.MPLinearKernel import MPLinearLayerConfig
from vllm.model_executor.layers import rotary_embedding
from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.scalar_type import scalar_types

from inducekv_vllm.errors import UnsupportedModel
from inducekv_vllm.vllm_seams.known_bugs import (
    Fault,
    check_experts,
    check_flags,
    check_states,
    has_4_bit_kernel,
    may_mix_adapters,
)
from selector.backbone.generation import score
from selector.backbone.model import Backbone
from tests.engine.parity import FEWER_PROCESSES, engine, greedy, served_logprobs, text_prompts
from tests.tiny_families import FAMILIES
from tests.tiny_hybrids import save_granite_hybrid, save_lfm2

TORCH_ROPE = {"compilation_config": {"custom_ops": ["-rotary_embedding"]}}


def test_a_refusal_names_the_version_and_the_report() -> None:
    assert str(Fault("0.32", "#1").refusal("it is wrong")) == "it is wrong (vLLM 0.32, vllm-project/vllm#1)"
    assert str(Fault("0.32", None).refusal("it is wrong")) == "it is wrong (vLLM 0.32, not reported)"


def test_a_fault_is_here_until_the_version_that_has_mended_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm.__version__", "0.33.0+cpu")
    assert [Fault("0.32", None, mended).is_here for mended in (None, "0.33", "0.34")] == [True, False, True]
    config: Any = SimpleNamespace(lora_config=object(), model_config=SimpleNamespace(enforce_eager=False))
    assert may_mix_adapters(config)
    monkeypatch.setattr("vllm.__version__", "0.32.0")
    assert not may_mix_adapters(config)  # of a compiled model
    config.model_config.enforce_eager = True
    assert may_mix_adapters(config)


# ---- what layers compute ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_flat", [False, True])
def test_queries_are_rotated_wrongly_by_heads(is_flat: bool) -> None:
    """[T, H, D], as latent attention and LFM2 have them; flat ones [T, H D] are right."""
    with set_current_vllm_config(VllmConfig()):
        rotation = RotaryEmbedding(16, 16, 64, 10000.0, True, torch.float32)
    query, key, at = torch.randn(5, 4, 16), torch.randn(5, 1, 16), torch.arange(5)
    if is_flat:
        query, key = query.flatten(1), key.flatten(1)
    expected, _ = rotation.forward_native(at, query.clone(), key.clone())
    found, _ = rotation.forward_cpu(at, query.clone(), key.clone())
    assert torch.allclose(found, expected, atol=1e-5) == is_flat


@pytest.mark.parametrize(
    ("scoring", "message"),
    [("sigmoid", "no sigmoid without groups.* would end the engine"), ("softmax", "leaves their bias out")],
)
def test_experts_are_chosen_wrongly(scoring: str, message: str) -> None:
    """MiniMax-M2's and Laguna's, ERNIE's."""
    layer, bias = nn.Identity(), torch.zeros(4)
    layer.router = CPURouter(2, 4, scoring_func=scoring, e_score_correction_bias=bias)
    with pytest.raises(UnsupportedModel, match=f"experts: .*{message}"):
        check_experts(nn.ModuleDict({"experts": layer}))
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0]])
    bias[3] = 9.0  # which would choose the last one
    if scoring == "sigmoid":
        with pytest.raises(AssertionError):
            layer.router.select_experts(logits, logits)
    else:
        assert sorted(layer.router.select_experts(logits, logits)[1][0].tolist()) == [0, 1]
    layer.router = CPURouter(*(2, 4, True, 1, 1), scoring_func=scoring, e_score_correction_bias=bias)
    check_experts(nn.ModuleDict({"experts": layer}))
    assert 3 in layer.router.select_experts(logits, logits)[1]


@pytest.mark.skipif(has_4_bit_kernel(), reason="this CPU has vLLM's kernel for 4-bit weights")
def test_4_bit_weights_are_taken_without_a_kernel() -> None:
    sizes = MPLinearLayerConfig((64, 64), (64, 64), scalar_types.uint4b8, torch.float16, 32, False)
    assert CPUWNA16LinearKernel.can_implement(sizes) == (True, None)


# ---- what flags do ---------------------------------------------------------------------------------------------------


def flags(**changes: Any) -> Any:
    """An engine's configuration, in one namespace."""
    known = {"tensor_parallel_size": 1, "enable_expert_parallel": False, "is_hybrid": False}
    known |= {"speculative_config": None, "prefix_match_unit": None, "max_num_batched_tokens": 16}
    known |= {"mamba_cache_mode": "align"}
    config = SimpleNamespace(**(known | changes))
    config.parallel_config = config.model_config = config.cache_config = config.scheduler_config = config
    return config


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"speculative_config": object()}, r"speculative decoding of a hybrid.*#39273\)"),
        ({"prefix_match_unit": 8}, r"--prefix-match-unit 8, which is not a whole block of states \(16 tokens\)"),
        ({"max_num_batched_tokens": 32}, "start with --max-num-batched-tokens 16, or with --no-enable-prefix-caching"),
    ],
)
def test_flags_of_hybrids_that_are_refused(change: dict[str, Any], reason: str) -> None:
    check_states(flags(), block=16, is_mamba_2=True)
    with pytest.raises(UnsupportedModel, match=reason):
        check_states(flags(**change), block=16, is_mamba_2=True)


def test_experts_of_several_ranks_are_refused() -> None:
    check_flags(flags(tensor_parallel_size=2))
    with pytest.raises(UnsupportedModel, match=r"--enable-expert-parallel on CPUs.*#57837\)"):
        check_flags(flags(tensor_parallel_size=2, enable_expert_parallel=True))


@contextmanager
def hybrid(save: Callable[[Path], Path], folder: Path, **options: Any) -> Iterator[tuple[Any, Backbone]]:
    """vLLM without InduceKV, and transformers."""
    usual = {"enforce_eager": True, "max_num_batched_tokens": 512, "enable_prefix_caching": True, "max_model_len": 1024}
    model = save(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rotary_embedding, "_ROPE_DICT", {})  # vLLM keeps what the engines of a process rotate by
        with engine(model, memory=False, environment=FEWER_PROCESSES, **usual | options) as llm:
            yield llm, Backbone.load(model)


def furthest(llm: Any, backbone: Backbone, prompt: list[int]) -> float:
    """The largest difference from transformers in a log-probability of the answer to a prompt."""
    (answer,) = llm.generate([{"prompt_token_ids": prompt}], greedy(max_tokens=24), use_tqdm=False)
    tokens, logprobs = served_logprobs(answer.outputs[0])
    inputs = {"input_ids": torch.tensor([prompt]), "attention_mask": torch.ones(1, len(prompt), dtype=torch.int64)}
    return float((logprobs - score(backbone, [inputs], [tokens])[0]).abs().max())


@pytest.mark.slow
def test_drafts_of_a_hybrid_are_checked_wrongly(tmp_path: Path) -> None:
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
    options = {"enable_prefix_caching": False, "speculative_config": drafts, **TORCH_ROPE}
    with hybrid(save_lfm2, tmp_path, **options) as (llm, backbone):
        assert furthest(llm, backbone, [20, 21, 22, 23] * 12) > 1


@pytest.mark.slow
def test_a_prefix_that_ends_within_a_block_of_states_is_found_wrongly(tmp_path: Path) -> None:
    with hybrid(save_lfm2, tmp_path, prefix_match_unit=32, **TORCH_ROPE) as (llm, backbone):
        prompt = torch.randint(20, 300, (200,), generator=torch.Generator().manual_seed(7)).tolist()
        assert max(furthest(llm, backbone, prompt[: 100 + 50 * turn]) for turn in range(3)) > 0.1


@pytest.mark.slow
def test_mamba_2_ends_the_engine_where_a_block_of_states_ends_within_a_step(tmp_path: Path) -> None:
    prompt = torch.randint(20, 300, (300,), generator=torch.Generator().manual_seed(7)).tolist()
    with (
        hybrid(save_granite_hybrid, tmp_path) as (llm, backbone),
        pytest.raises((AssertionError, RuntimeError, IndexError)),
    ):
        furthest(llm, backbone, prompt)


@pytest.mark.slow
def test_experts_of_several_ranks_end_the_engine(tmp_path: Path) -> None:
    """Within a process of its own."""
    model = FAMILIES["qwen3-moe"](tmp_path)
    environment = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}
    options: dict[str, Any] = {"enforce_eager": True, "tensor_parallel_size": 2, "enable_expert_parallel": True}
    with (
        pytest.raises(Exception, match=r"Engine|rank"),
        engine(model, memory=False, environment=environment, **options) as llm,
    ):
        llm.chat(text_prompts(1, 1)[0].messages, greedy())
