"""FlashAttention with its log-sum-exp is called as vLLM calls it without."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.attention.backends import flash_attn
from vllm.v1.attention.backends.flash_attn import FlashAttentionMetadata

from inducekv_vllm.attention.merged.flash import InduceKVFlashImpl

J, H, D, C = 2, 4, 16, 8
ROWS, PADDING = 5, 3
ONLY_VLLMS = {"dynamic_causal", "mask_mod", "aux_tensors"}  # None for causal attention over the whole cache


def make_impl(monkeypatch: pytest.MonkeyPatch, version: int) -> InduceKVFlashImpl:
    monkeypatch.setattr(flash_attn, "get_flash_attn_version", lambda **_: version)
    return InduceKVFlashImpl(H, D, D**-0.5, J, None, None, "auto")


def metadata() -> FlashAttentionMetadata:
    return FlashAttentionMetadata(
        num_actual_tokens=ROWS,
        max_query_len=4,
        query_start_loc=torch.tensor([0, 4, 5], dtype=torch.int32),
        max_seq_len=11,
        seq_lens=torch.tensor([4, 11], dtype=torch.int32),
        block_table=torch.tensor([[0, 0], [1, 2]], dtype=torch.int32),
        slot_mapping=torch.arange(ROWS),
        scheduler_metadata=torch.ones(3, dtype=torch.int32),
        max_num_splits=7,
    )


@pytest.mark.parametrize("version", [2, 3, 4])
def test_the_call_is_vllms_own_but_for_the_log_sum_exp(version: int, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[dict[str, Any]] = []

    def attend(**arguments: Any) -> Any:
        calls.append(arguments)
        lse = torch.arange(H * ROWS, dtype=torch.float32).view(H, ROWS)
        return (arguments["out"], lse) if arguments.get("return_softmax_lse") else arguments["out"]

    impl = make_impl(monkeypatch, version)
    monkeypatch.setattr(flash_attn, "flash_attn_varlen_func", attend, raising=False)
    scale = torch.ones(())
    layer: Any = SimpleNamespace(_q_scale=scale, _k_scale=scale, _v_scale=scale)
    query, output = torch.randn(ROWS + PADDING, H, D), torch.zeros(ROWS + PADDING, H, D)
    kv_cache, step = torch.randn(3, J, C, 2 * D), metadata()
    for impl.keeps_lse in (False, True):
        impl.forward(layer, query, query, query, kv_cache, step, output)
    own, ours = calls
    assert ours.pop("return_softmax_lse") is True
    assert {name: own.pop(name, None) for name in ONLY_VLLMS} == dict.fromkeys(ONLY_VLLMS)
    assert own.keys() == ours.keys()
    for name, value in own.items():
        if isinstance(value, torch.Tensor):
            same = (value.data_ptr(), value.shape, value.stride(), value.dtype)
            assert same == (ours[name].data_ptr(), ours[name].shape, ours[name].stride(), ours[name].dtype), name
        else:
            assert value == ours[name], name
    assert impl.self_lse is not None
    assert impl.self_lse.tolist() == [[head * ROWS + row for head in range(H)] for row in range(ROWS)]
